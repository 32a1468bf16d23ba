# SPDX-License-Identifier: Apache-2.0
"""What the report shows of a run: its files as `run` reads them, the `words` for them, and `analyses`."""
