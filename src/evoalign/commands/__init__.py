# SPDX-License-Identifier: Apache-2.0
"""Commands of the command line, a file each. Everything heavy is imported by the command that needs it."""
