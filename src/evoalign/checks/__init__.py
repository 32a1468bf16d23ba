# SPDX-License-Identifier: Apache-2.0
"""What a run asks of itself while it trains."""
