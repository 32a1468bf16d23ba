// SPDX-License-Identifier: Apache-2.0
// A browser starts no worker for a page that was opened as a file. Search then runs in a hidden frame instead, which
// is given the two functions of a worker that the search script calls.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.body.appendChild(document.createElement("iframe"));
      this.frame.hidden = true;
      const inner = this.frame.contentWindow;
      addEventListener("message", (event) => {
        if (event.source !== inner) return;
        const copy = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(copy);
        if (this.onmessage) this.onmessage(copy);
      });
      this.ready = new Promise((resolve) => {
        inner.document.open();
        inner.document.write(`<script>
          postMessage = (data) => parent.postMessage(data, "*");
          importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done) => {
            const script = document.createElement("script");
            script.src = url;
            script.onload = done;
            document.body.appendChild(script);
          })), Promise.resolve());
        <\/script><body><script src="${url}"><\/script>`);
        inner.document.close();
        inner.onload = resolve;
      });
    }
    postMessage(data) {
      const inner = this.frame.contentWindow;
      this.ready.then(() => inner.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
