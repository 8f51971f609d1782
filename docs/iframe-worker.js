/* Search from a page opened from the disk. A browser gives such a page no Worker, so the theme's search runs in a hidden
   frame here, behind the face of one. Read by mkdocs-material's offline plugin in place of the copy on another host. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      this.ready = new Promise((resolve) => {
        const inside = this.frame.contentWindow;
        inside.postMessage = (data) => {
          const event = new MessageEvent("message", { data });
          this.dispatchEvent(event);
          this.onmessage?.(event);
        };
        inside.importScripts = (...urls) =>
          urls.reduce((before, each) => before.then(() => this.load(each)), Promise.resolve());
        this.load(url).then(resolve);
      });
    }
    load(url) {
      const page = this.frame.contentDocument;
      return new Promise((resolve) => {
        const script = page.createElement("script");
        script.src = url;
        script.onload = script.onerror = resolve;
        page.body.appendChild(script);
      });
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
