package lb

import (
	"maps"
	"slices"
)

// Entry is one entry of a map.
type Entry[K comparable, V any] struct {
	Key   K
	Value V
}

// Changes are the writes of a Plan to one table.
type Changes[K comparable, V any] struct {
	Put    []Entry[K, V]
	Delete []K
}

func (c *Changes[K, V]) put(k K, v V) { c.Put = append(c.Put, Entry[K, V]{k, v}) }

func (c *Changes[K, V]) delete(k K) { c.Delete = append(c.Delete, k) }

// Table describes one BPF map: its key and value, where a State and a Plan keep its entries, and how a Planner
// fills it. The content of a table is either built step by step by the Planner (held and find), or derived from the whole
// Input each time (derive), which suits small tables.
type Table[K, V comparable] struct {
	Name    string // of the BPF map
	compare func(a, b K) int
	state   func(*State) *map[K]V
	plan    func(*Plan) *Changes[K, V]
	limit   func(*Limits) *int // nil: the Planner does not watch how full the map is

	held func(*Planner, func(K, V))               // calls the function for each entry that the map holds after all plans
	find func(*Audit, K, V) (want V, exists bool) // the entry that should stand under a key

	derive func(*Input) map[K]V
	line   func(K, V) string // of a derived table, for State.Text
}

// table is a Table of any key and value.
type table interface {
	name() string

	init(s *State)
	clone(from, to *State)
	lines(s *State) []string

	apply(p *Plan, deletes bool, s *State)
	writes(p *Plan, deletes bool) int
	prefix(n *int, deletes bool, from, to *Plan)
	diff(have, want *State, p *Plan)
	sortDeletes(p *Plan)

	adopt(p *Planner, have *State)
	update(p *Planner, in *Input, plan *Plan)
	free(p *Plan, used *Limits)
	fill(p *Planner, s *State)
	count(p *Planner) int
	auditAll(a *Audit, s *State)
}

// Step is a part of every Plan: either all puts or all deletes of one table.
type Step struct {
	Table   string
	Deletes bool
	table   table
}

var steps = buildSteps()

// Steps returns the steps of every Plan, in the order in which they must be carried out: puts into one table after
// the other, then deletes in the reverse order of tables. The result must not be changed.
func Steps() []Step { return steps }

func buildSteps() []Step {
	var puts, deletes []Step
	for _, t := range tables() {
		puts = append(puts, Step{Table: t.name(), table: t})
		deletes = append(deletes, Step{Table: t.name(), Deletes: true, table: t})
	}
	slices.Reverse(deletes)
	return slices.Concat(puts, deletes)
}

// Entries returns the entries of the table in s.
func (t *Table[K, V]) Entries(s *State) map[K]V { return *t.state(s) }

// Changes returns the writes of p to the table.
func (t *Table[K, V]) Changes(p *Plan) *Changes[K, V] { return t.plan(p) }

// SetLimit notes in l that the table has room for max entries.
func (t *Table[K, V]) SetLimit(l *Limits, max int) {
	if t.limit != nil {
		*t.limit(l) = max
	}
}

// Audit counts an entry of the map in a. Each entry must be passed once.
func (t *Table[K, V]) Audit(a *Audit, k K, v V) {
	var want V
	var exists bool
	if t.derive != nil {
		want, exists = t.Entries(&a.planner.derived)[k]
	} else {
		want, exists = t.find(a, k, v)
	}
	if exists {
		a.found++
	}
	if !exists || want != v {
		a.wrong++
	}
}

func (t *Table[K, V]) name() string { return t.Name }

func (t *Table[K, V]) init(s *State) { *t.state(s) = map[K]V{} }

func (t *Table[K, V]) clone(from, to *State) { *t.state(to) = maps.Clone(*t.state(from)) }

func (t *Table[K, V]) apply(p *Plan, deletes bool, s *State) {
	changes, entries := t.plan(p), *t.state(s)
	if deletes {
		for _, k := range changes.Delete {
			delete(entries, k)
		}
		return
	}
	for _, e := range changes.Put {
		entries[e.Key] = e.Value
	}
}

func (t *Table[K, V]) writes(p *Plan, deletes bool) int {
	if deletes {
		return len(t.plan(p).Delete)
	}
	return len(t.plan(p).Put)
}

// prefix copies the first *n writes of a step and lowers *n by their number.
func (t *Table[K, V]) prefix(n *int, deletes bool, from, to *Plan) {
	if deletes {
		t.plan(to).Delete = take(n, t.plan(from).Delete)
	} else {
		t.plan(to).Put = take(n, t.plan(from).Put)
	}
}

// take returns the first *n of s and lowers *n by their number.
func take[T any](n *int, s []T) []T {
	k := min(max(*n, 0), len(s))
	*n -= k
	if k == 0 {
		return nil
	}
	return s[:k]
}

// diff adds the writes to p that turn the table of have into that of want, sorted by key.
func (t *Table[K, V]) diff(have, want *State, p *Plan) {
	old, entries, changes := *t.state(have), *t.state(want), t.plan(p)
	for k, v := range entries {
		if o, ok := old[k]; !ok || o != v {
			changes.put(k, v)
		}
	}
	for k := range old {
		if _, ok := entries[k]; !ok {
			changes.delete(k)
		}
	}
	slices.SortFunc(changes.Put, func(a, b Entry[K, V]) int { return t.compare(a.Key, b.Key) })
	t.sortDeletes(p)
}

func (t *Table[K, V]) sortDeletes(p *Plan) { slices.SortFunc(t.plan(p).Delete, t.compare) }

// free gives back the room of the entries that p deletes.
func (t *Table[K, V]) free(p *Plan, used *Limits) {
	if t.limit != nil {
		*t.limit(used) -= len(t.plan(p).Delete)
	}
}

// adopt takes over what the map of a derived table holds.
func (t *Table[K, V]) adopt(p *Planner, have *State) {
	if t.derive != nil {
		*t.state(&p.derived) = maps.Clone(*t.state(have))
	}
}

// update adds the writes to a derived table to plan.
func (t *Table[K, V]) update(p *Planner, in *Input, plan *Plan) {
	if t.derive == nil {
		return
	}
	var want State
	*t.state(&want) = t.derive(in)
	t.diff(&p.derived, &want, plan)
	*t.state(&p.derived) = *t.state(&want)
}

// entriesOf calls visit for each entry that the map holds once all plans of p have been carried out.
func (t *Table[K, V]) entriesOf(p *Planner, visit func(K, V)) {
	if t.derive == nil {
		t.held(p, visit)
		return
	}
	for k, v := range t.Entries(&p.derived) {
		visit(k, v)
	}
}

func (t *Table[K, V]) fill(p *Planner, s *State) {
	entries := *t.state(s)
	t.entriesOf(p, func(k K, v V) { entries[k] = v })
}

func (t *Table[K, V]) count(p *Planner) int {
	n := 0
	t.entriesOf(p, func(K, V) { n++ })
	return n
}

func (t *Table[K, V]) auditAll(a *Audit, s *State) {
	for k, v := range *t.state(s) {
		t.Audit(a, k, v)
	}
}

// lines describes the entries of a derived table, sorted by key.
func (t *Table[K, V]) lines(s *State) []string {
	if t.derive == nil {
		return nil
	}
	var out []string
	for _, k := range slices.SortedFunc(maps.Keys(*t.state(s)), t.compare) {
		out = append(out, t.line(k, (*t.state(s))[k]))
	}
	return out
}

// NewState returns a state without entries that can be written to.
func NewState() State {
	var s State
	for _, t := range tables() {
		t.init(&s)
	}
	return s
}

// Clone returns a copy that shares nothing with s.
func (s State) Clone() State {
	var c State
	for _, t := range tables() {
		t.clone(&s, &c)
	}
	return c
}

// Apply carries out the writes of p on s.
func (s State) Apply(p Plan) {
	for _, step := range steps {
		step.table.apply(&p, step.Deletes, &s)
	}
}

// Writes returns how many map entries p writes or deletes.
func (p Plan) Writes() int {
	n := 0
	for _, step := range steps {
		n += step.table.writes(&p, step.Deletes)
	}
	return n
}

// Prefix returns the first n writes of p, or all of p when n is not smaller than their number. It shares p's memory.
func (p Plan) Prefix(n int) Plan {
	if n >= p.Writes() {
		return p
	}
	var prefix Plan
	for _, step := range steps {
		step.table.prefix(&n, step.Deletes, &p, &prefix)
	}
	return prefix
}
