# SPDX-License-Identifier: Apache-2.0
"""Many runs of one config: grids of settings and seeds, and searches. Each run has its own process."""
