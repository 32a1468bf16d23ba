# SPDX-License-Identifier: Apache-2.0
"""What random noise on the weights does to the reward."""
