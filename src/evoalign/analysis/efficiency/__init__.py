# SPDX-License-Identifier: Apache-2.0
"""What training costs until a measure is reached, and how much the ends of seeds differ."""
