# SPDX-License-Identifier: Apache-2.0
"""A run of Evolution Strategies, from its config to what it leaves, and what is done with a run afterwards."""
