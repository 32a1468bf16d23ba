# SPDX-License-Identifier: Apache-2.0
"""What lies between models: the reward along straight lines and on planes through their weights."""
