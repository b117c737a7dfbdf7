// Package lbtest makes plans for tests that write maps without a [lb.Planner].
package lbtest

import (
	"cmp"
	"fmt"
	"reflect"
	"slices"

	"github.com/isthmus-net/isthmus/bpf/lb"
)

// Diff returns the writes that turn have into want, sorted by the text of their keys. Any order will do, for State and
// Plan have the same fields: one for each table.
func Diff(have, want lb.State) lb.Plan {
	var p lb.Plan
	from, to, plan := reflect.ValueOf(have), reflect.ValueOf(want), reflect.ValueOf(&p).Elem()
	for i := range from.NumField() {
		changes := plan.FieldByName(from.Type().Field(i).Name)
		diffTable(from.Field(i), to.Field(i), changes.FieldByName("Put"), changes.FieldByName("Delete"))
	}
	return p
}

func diffTable(have, want, put, deletes reflect.Value) {
	for _, k := range sortedKeys(want) {
		v := want.MapIndex(k)
		if old := have.MapIndex(k); !old.IsValid() || !old.Equal(v) {
			entry := reflect.New(put.Type().Elem()).Elem()
			entry.FieldByName("Key").Set(k)
			entry.FieldByName("Value").Set(v)
			put.Set(reflect.Append(put, entry))
		}
	}
	for _, k := range sortedKeys(have) {
		if !want.MapIndex(k).IsValid() {
			deletes.Set(reflect.Append(deletes, k))
		}
	}
}

func sortedKeys(m reflect.Value) []reflect.Value {
	keys := m.MapKeys()
	text := func(v reflect.Value) string { return fmt.Sprint(v.Interface()) }
	slices.SortFunc(keys, func(a, b reflect.Value) int { return cmp.Compare(text(a), text(b)) })
	return keys
}
