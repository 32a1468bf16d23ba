# SPDX-License-Identifier: Apache-2.0
"""`python -m evoalign.cli`."""

from evoalign.cli import main

main()
