# SPDX-License-Identifier: Apache-2.0
"""A run, or several, as one HTML page that loads nothing: `page.render` of what `view` describes.

All that is read of a run is data from anywhere: `markup.text` is the only way of it into the page, and completions lie
in it as JSON that no browser runs. A content security policy allows the page's own script and style by their hashes.
"""
