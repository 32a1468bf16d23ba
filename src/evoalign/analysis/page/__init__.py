# SPDX-License-Identifier: Apache-2.0
"""The report of runs as one HTML page that loads nothing."""
