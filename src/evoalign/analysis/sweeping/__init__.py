# SPDX-License-Identifier: Apache-2.0
"""Many runs of one config: grids of settings and seeds, and a search. Each run is a process of its own."""
