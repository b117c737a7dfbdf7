package hostile

import (
	"slices"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
)

// Shrink returns the smallest objects that it finds among those of objects for which fails still reports true: first fewer
// objects, then objects with fewer and shorter fields. objects itself must fail. A fails that reports false from some time
// on ends the search early.
func Shrink(objects []Object, fails func([]Object) bool) []Object {
	objects = fewest(objects, fails)
	for i := range objects {
		objects[i].Unstructured = objects[i].DeepCopy()
		smaller := func(fields map[string]any) bool {
			try := slices.Clone(objects)
			try[i].Unstructured = &unstructured.Unstructured{Object: fields}
			return sameObject(objects[i], try[i]) && fails(try)
		}
		objects[i].Object = shrinkFields(objects[i].Object, smaller)
	}
	return objects
}

// fewest removes ever smaller runs of objects, as delta debugging does (Zeller and Hildebrandt, "Simplifying and Isolating
// Failure-Inducing Input", IEEE TSE 2002).
func fewest(objects []Object, fails func([]Object) bool) []Object {
	for size := len(objects) / 2; size > 0; size /= 2 {
		for at := 0; at < len(objects); {
			try := slices.Delete(slices.Clone(objects), at, min(at+size, len(objects)))
			if len(try) > 0 && fails(try) {
				objects = try
			} else {
				at += size
			}
		}
	}
	return objects
}

// sameObject reports whether two forms are of one object.
func sameObject(a, b Object) bool {
	return a.GetAPIVersion() == b.GetAPIVersion() && a.GetKind() == b.GetKind() && a.GetNamespace() == b.GetNamespace() && a.GetName() == b.GetName()
}

// shrinkFields returns fields without what fails can do without.
func shrinkFields(fields map[string]any, fails func(map[string]any) bool) map[string]any {
	for {
		smaller, found := reduce(fields, func(v any) bool { return fails(v.(map[string]any)) })
		if !found {
			return fields
		}
		fields = smaller.(map[string]any)
	}
}

// reduce returns the first smaller form of v that still fails: without an element, or with a smaller one.
func reduce(v any, fails func(any) bool) (any, bool) {
	switch v := v.(type) {
	case map[string]any:
		return reduceMap(v, fails)
	case []any:
		return reduceList(v, fails)
	case string:
		const short = 16
		if cut := v[:min(len(v), len(v)/2)]; len(v) > short && fails(cut) {
			return cut, true
		}
	}
	return v, false
}

func reduceMap(m map[string]any, fails func(any) bool) (any, bool) {
	for _, k := range sortedKeys(m) {
		try := runtime.DeepCopyJSON(m)
		delete(try, k)
		if fails(try) {
			return try, true
		}
	}
	for _, k := range sortedKeys(m) {
		with := func(v any) map[string]any {
			try := runtime.DeepCopyJSON(m)
			try[k] = v
			return try
		}
		if v, ok := reduce(m[k], func(v any) bool { return fails(with(v)) }); ok {
			return with(v), true
		}
	}
	return m, false
}

func reduceList(list []any, fails func(any) bool) (any, bool) {
	for size := len(list); size > 0; size /= 2 {
		for at := 0; at < len(list); at += size {
			try := slices.Delete(slices.Clone(list), at, min(at+size, len(list)))
			if fails(try) {
				return try, true
			}
		}
	}
	for i := range min(len(list), 8) { // one long list would take all the time
		with := func(v any) []any {
			try := slices.Clone(list)
			try[i] = v
			return try
		}
		if v, ok := reduce(list[i], func(v any) bool { return fails(with(v)) }); ok {
			return with(v), true
		}
	}
	return list, false
}

func sortedKeys(m map[string]any) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
