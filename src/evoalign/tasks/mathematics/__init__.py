# SPDX-License-Identifier: Apache-2.0
"""Questions of mathematics whose answers are compared as mathematics: GSM8K and MATH."""
