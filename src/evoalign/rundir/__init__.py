# SPDX-License-Identifier: Apache-2.0
"""What a run leaves on disk: its folder, journal, checkpoints, manifest, and what makes it the same run."""
