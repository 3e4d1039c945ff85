/* Search in pages opened from a folder. Browsers start no worker at file://, so that a hidden frame
   runs the worker's script: messages go both ways, importScripts becomes script tags. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const address = new URL(url, document.baseURI).href
      const waiting = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      this.postMessage = data => waiting.push(data)
      this.terminate = () => frame.remove()
      const start = () => {
        document.body.append(frame)
        const inside = frame.contentWindow
        const load = source =>
          new Promise((done, failed) => {
            const script = inside.document.createElement("script")
            script.src = new URL(source, address).href
            script.onload = done
            script.onerror = failed
            inside.document.body.append(script)
          })
        inside.importScripts = (...sources) =>
          sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve())
        inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
        load(address).then(() => {
          this.postMessage = data => inside.dispatchEvent(new MessageEvent("message", { data }))
          waiting.forEach(data => this.postMessage(data))
        })
      }
      document.body ? start() : addEventListener("DOMContentLoaded", start)
    }
  }
}
