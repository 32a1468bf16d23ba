# SPDX-License-Identifier: Apache-2.0
"""The files of a run: its directory, journal, checkpoints, checksums and manifest."""
