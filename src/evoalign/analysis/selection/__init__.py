# SPDX-License-Identifier: Apache-2.0
"""Other rules on one generation of a run: a vote of its best members, or a merge of them."""
