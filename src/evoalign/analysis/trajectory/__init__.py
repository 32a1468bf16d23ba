# SPDX-License-Identifier: Apache-2.0
"""The way of a training through its weights, beside a random walk of the same noise."""
