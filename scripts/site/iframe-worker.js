// The search runs in a worker, and browsers start none from a page that was opened as a file. Such a page gets one that
// runs in a hidden frame. The site's generator would load another from the network if this file had another name.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.documentElement.append(this.frame);
      this.inside = this.frame.contentWindow;
      // Later, as a worker would: what the page does at a message is not done inside of what caused it.
      this.inside.postMessage = (data) => setTimeout(() => this.onmessage?.(new MessageEvent("message", { data })));
      const script = this.inside.document.createElement("script");
      script.src = url;
      this.ready = new Promise((loaded, failed) => Object.assign(script, { onload: loaded, onerror: failed }));
      this.ready.catch((event) => this.onerror?.(event));
      this.inside.document.body.append(script);
    }
    postMessage(data) {
      const event = () => new this.inside.MessageEvent("message", { data });
      this.ready.then(() => setTimeout(() => this.inside.dispatchEvent(event())), () => {});
    }
    terminate() {
      this.frame.remove();
    }
  };
}
