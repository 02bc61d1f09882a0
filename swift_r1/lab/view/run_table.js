// The table of runs: a column each as Quasar's, the run's name with its mark, and a button to rename it. A component of
// its own because templates that are given as slots are made anew whenever anything on the page changes, and with them
// go the focus and an open field.
export default {
  template: `
    <q-table :columns="formatted">
      <template #header-cell="cell">
        <q-th :props="cell"><button class="view-sort">{{ cell.col.label }}</button></q-th>
      </template>
      <template #body-cell-run="cell">
        <q-td :props="cell">
          <span class="view-mark" :style="{ background: cell.row.colour }"></span>
          <a :href="cell.row.link" title="this run alone">{{ cell.value }}</a>
          <button class="view-rename" title="rename" :aria-label="'rename ' + cell.value">✎
            <q-popup-edit v-model="cell.row.given" v-slot="scope" buttons
                @save="(name) => $emit('rename', { run: cell.row.key, name })">
              <q-input v-model="scope.value" dense autofocus label="name (empty: what tells it apart)"
                @keyup.enter="scope.set" />
            </q-popup-edit>
          </button>
        </q-td>
      </template>
    </q-table>`,
  props: { columns: Array },
  emits: ["rename"],
  computed: {
    formatted() {
      return this.columns.map((column) => (column.metric ? { ...column, format: view.number } : column));
    },
  },
};
