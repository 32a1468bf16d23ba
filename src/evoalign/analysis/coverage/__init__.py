# SPDX-License-Identifier: Apache-2.0
"""Which problems a model solves when it may try often: by sampling, and with noise on its weights."""
