// The search runs in a worker, and browsers start none from a page that was opened as a file. Such a page gets one that
// runs in a hidden frame. The site's generator would load another from the network if this file had another name.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.documentElement.append(this.frame);
      this.inside = this.frame.contentWindow;
      // As between a page and a worker: later, and a copy.
      this.inside.postMessage = (message) => {
        const data = structuredClone(message);
        setTimeout(() => this.onmessage?.(new MessageEvent("message", { data })));
      };
      const script = this.inside.document.createElement("script");
      script.src = url;
      this.ready = new Promise((loaded, failed) => Object.assign(script, { onload: loaded, onerror: failed }));
      this.ready.catch((event) => this.onerror?.(event));
      this.inside.document.body.append(script);
    }
    postMessage(message) {
      const event = new this.inside.MessageEvent("message", { data: structuredClone(message) });
      this.ready.then(() => setTimeout(() => this.inside.dispatchEvent(event)), () => {});
    }
    terminate() {
      this.frame.remove();
    }
  };
}
