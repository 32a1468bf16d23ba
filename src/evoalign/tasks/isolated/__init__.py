# SPDX-License-Identifier: Apache-2.0
"""Tasks whose scoring runs in a process that can be killed."""
