package objectcache

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// item is a compacted ConfigMap: the Service that it describes, and its content.
type item struct {
	service clusterset.ServiceName
	says    string
}

func object(name, about, says string, version int) *corev1.ConfigMap {
	return &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: "demo", Name: name, ResourceVersion: fmt.Sprint(version)},
		Data:       map[string]string{"about": about, "says": says},
	}
}

func compact(obj client.Object) *item {
	c := obj.(*corev1.ConfigMap) //nolint:forcetypeassert // the tests have no other kind
	i := &item{says: c.Data["says"]}
	if about := c.Data["about"]; about != "" {
		i.service = clusterset.ServiceName{Namespace: "demo", Name: about}
	}
	return i
}

// In any order of its events, the Informer holds the state of the API server, indexes it, and reports each change once: to
// Before while readers see the old item, to After when they see the new one.
func TestInformerFollowsTheServer(t *testing.T) {
	outer := t
	rapid.Check(t, func(t *rapid.T) {
		var m *Informer[*item, clusterset.ServiceName]
		told := map[string]string{} // content by object, from the reported changes alone
		name := func(i *item) string { return strings.Fields(i.says)[0] }
		m = newInformer(outer, Config[*item, clusterset.ServiceName]{
			Before: func(was, is *item, _ bool) {
				if have := m.Get("demo", name(Either(was, is))); have != was {
					t.Fatalf("before %v became %v there is %v", was, is, have)
				}
			},
			After: func(was, is *item, _ bool) {
				n := name(Either(was, is))
				if have := m.Get("demo", n); have != is {
					t.Fatalf("after %v became %v there is %v", was, is, have)
				}
				if was != nil && told[n] != was.says || was == nil && told[n] != "" {
					t.Fatalf("%s was %v, but %q was told last", n, was, told[n])
				}
				delete(told, n)
				if is != nil {
					told[n] = is.says
				}
			},
		})
		names := rapid.SampledFrom([]string{"a", "b", "c", "d"})
		abouts := rapid.SampledFrom([]string{"", "hello", "world"})
		model := map[string]*corev1.ConfigMap{}
		for version := range rapid.IntRange(1, 30).Draw(t, "steps") {
			next := func() *corev1.ConfigMap {
				n := names.Draw(t, "name")
				return object(n, abouts.Draw(t, "about"), fmt.Sprintf("%s %d", n, version), version)
			}
			var err error
			switch rapid.SampledFrom([]string{"add", "add", "delete", "replace"}).Draw(t, "step") {
			case "add":
				o := next()
				model[o.Name] = o
				err = m.Add(o)
			case "delete":
				o := next()
				delete(model, o.Name)
				err = m.Delete(o)
			case "replace":
				clear(model)
				var list []any
				for range rapid.IntRange(0, 3).Draw(t, "listed") {
					o := next()
					if model[o.Name] == nil {
						list = append(list, o)
						model[o.Name] = o
					}
				}
				err = m.Replace(list, fmt.Sprint(version))
				if m.Latest() != fmt.Sprint(version) {
					t.Fatalf("after a list of version %d the latest is %q", version, m.Latest())
				}
			}
			if err != nil {
				t.Fatal(err)
			}
			want := map[string]string{}
			about := map[string][]string{}
			for n, o := range model {
				want[n] = o.Data["says"]
				if a := o.Data["about"]; a != "" {
					about[a] = append(about[a], o.Data["says"])
				}
			}
			if diff := cmp.Diff(want, told); diff != "" {
				t.Fatalf("told (-want +have):\n%s", diff)
			}
			if diff := cmp.Diff(slices.Sorted(maps.Values(want)), says(m.All())); diff != "" {
				t.Fatalf("all (-want +have):\n%s", diff)
			}
			for _, a := range []string{"hello", "world"} {
				if diff := cmp.Diff(slices.Sorted(slices.Values(about[a])), says(m.Indexed(clusterset.ServiceName{Namespace: "demo", Name: a}))); diff != "" {
					t.Fatalf("about %s (-want +have):\n%s", a, diff)
				}
			}
		}
	})
}

func says(items []*item) []string {
	var all []string
	for _, i := range items {
		all = append(all, i.says)
	}
	slices.Sort(all)
	return all
}

// newInformer returns an Informer of ConfigMaps, indexed by the Service that they describe.
func newInformer(t *testing.T, cfg Config[*item, clusterset.ServiceName]) *Informer[*item, clusterset.ServiceName] {
	t.Helper()
	cfg.Object, cfg.Compact = &corev1.ConfigMap{}, compact
	cfg.Index = func(i *item) (clusterset.ServiceName, bool) { return i.service, i.service.Name != "" }
	m, err := New(newScheme(t), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// Latest is the resource version of the last watch event, a deletion included.
func TestLatest(t *testing.T) {
	m := newInformer(t, Config[*item, clusterset.ServiceName]{})
	for version, step := range []func(any) error{m.Add, m.Update, m.Delete} {
		if err := step(object("a", "hello", "a", version+5)); err != nil {
			t.Fatal(err)
		}
		if want := fmt.Sprint(version + 5); m.Latest() != want {
			t.Errorf("step %d: the latest is %q, want %s", version, m.Latest(), want)
		}
	}
	if len(m.All()) != 0 {
		t.Errorf("still there: %v", says(m.All()))
	}
}

// Swap replaces the given item, under the same index, and no other.
func TestSwap(t *testing.T) {
	i := newInformer(t, Config[*item, clusterset.ServiceName]{})
	if err := i.Add(object("x", "web", "large", 1)); err != nil {
		t.Fatal(err)
	}
	was := i.Get("demo", "x")
	small := &item{service: was.service, says: "small"}
	if !i.Swap("demo", "x", was, small) || i.Get("demo", "x") != small {
		t.Error("the item is not replaced")
	}
	if got := i.Indexed(was.service); !slices.Equal(got, []*item{small}) {
		t.Errorf("indexed are %v", got)
	}
	if i.Swap("demo", "x", was, was) || i.Swap("demo", "y", was, small) || i.Get("demo", "x") != small || i.Get("demo", "y") != nil {
		t.Error("a former or unknown item is replaced")
	}
}
