# SPDX-License-Identifier: Apache-2.0
"""Models compared in pairs by a judge, and what their judgments come to: ratings, wins, and how far to trust them."""
