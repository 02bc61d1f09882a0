// A block of coloured tokens and the panel that says everything about one of them. The numbers stay a JSON text until
// they are needed, and listeners sit on the block: 32,768 tokens are as quick as 100.
export default {
  template: `
    <div class="token-block">
      <div ref="block" class="tokens text" tabindex="0" role="group" aria-label="tokens of the completion" @mouseover="pointed"
        @click="clicked" @keydown="pressed" @focus="focused"></div>
      <div ref="panel" class="token-panel" aria-live="polite"></div>
    </div>`,
  props: { html: String, numbers: String },
  mounted() {
    this.$refs.block.innerHTML = this.html;
    this.tokens = this.$refs.block.querySelectorAll("i");
    this.tokens.forEach((token, place) => (token.place = place));
    this.columns = JSON.parse(this.numbers);
    this.current = null;
    this.$refs.panel.textContent = "point at a token, click it, or go through them with the arrow keys";
    this.held = false; // a click holds the panel at a token until the next one
  },
  methods: {
    recolour(classes) {
      classes.split(",").forEach((one, place) => {
        const token = this.tokens[place];
        token.className = one + (token.classList.contains("sp") ? " sp" : "");
      });
      if (this.current !== null) this.tokens[this.current].classList.add("at");
    },
    pointed(event) {
      const token = event.target.closest("i");
      if (token && !this.held) this.show(token.place);
    },
    clicked(event) {
      const token = event.target.closest("i");
      this.held = Boolean(token) && !(this.held && token.place === this.current);
      if (token) this.show(token.place);
    },
    focused() {
      if (this.current === null && this.tokens.length) this.show(0);
    },
    pressed(event) {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      event.stopPropagation();
      this.held = true;
      this.show(Math.min(this.tokens.length - 1, Math.max(0, (this.current ?? -1) + step)));
      this.tokens[this.current].scrollIntoView({ block: "nearest" });
    },
    show(place) {
      if (this.current !== null) this.tokens[this.current].classList.remove("at");
      this.current = place;
      this.tokens[place].classList.add("at");
      const rows = Object.entries(this.columns).map(([name, values]) => {
        const row = document.createElement("span");
        const value = values[place];
        row.append(Object.assign(document.createElement("b"), { textContent: name.replaceAll("_", " ") }));
        row.append(` ${value === null ? "-" : value}`);
        return row;
      });
      const number = document.createElement("span");
      number.textContent = `${place + 1} of ${this.tokens.length}`;
      this.$refs.panel.replaceChildren(number, ...rows);
    },
  },
};
