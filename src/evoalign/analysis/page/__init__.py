# SPDX-License-Identifier: Apache-2.0
"""Report page of runs: a single HTML file that loads nothing."""
