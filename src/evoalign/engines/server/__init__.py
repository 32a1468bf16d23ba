# SPDX-License-Identifier: Apache-2.0
"""What engines over HTTP share: a client, the process of a server, adapters as files, and the engine around them."""
