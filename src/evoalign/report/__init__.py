# SPDX-License-Identifier: Apache-2.0
"""Reports of a run: rows, figures, tables, progress."""
