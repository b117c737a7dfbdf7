package memory

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
)

// knowing is packed, and knows whether it is Local.
type knowing struct {
	packed

	opened *int
}

func (p *knowing) Local() bool { return isLocal(&p.ObjectMeta) }

func (p *knowing) Unpack() client.Object {
	*p.opened++
	return p.packed.Unpack()
}

func isLocal(o metav1.Object) bool { return o.GetLabels()["matters"] == "here" }

// What matters in its own member alone is listed for those who ask for it, or left out, however it is kept; and what
// is left out is not unpacked where that can be helped.
func TestListLocal(t *testing.T) {
	t.Parallel()
	scheme := runtime.NewScheme()
	if err := corev1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	opened := 0
	for name, tc := range map[string]struct {
		pack   func(client.Object) reconcile.Packed
		opened int // to list what is not Local
	}{
		"as it is": {}, "packed": {pack: func(o client.Object) reconcile.Packed { return &packed{o.(*corev1.ConfigMap).ObjectMeta} }},
		"packed, and knows it": {func(o client.Object) reconcile.Packed { return &knowing{packed{o.(*corev1.ConfigMap).ObjectMeta}, &opened} }, 1},
	} {
		t.Run(name, func(t *testing.T) {
			w := reconcile.Watch{Object: &corev1.ConfigMap{}, Pack: tc.pack, Local: func(o client.Object) bool { return isLocal(o) }}
			m, err := New(scheme, []reconcile.Watch{w}, func(reconcile.Watch, client.Object, client.Object) {}, nil)
			if err != nil {
				t.Fatal(err)
			}
			if err := m.Kinds()[0].Replace(nil, ""); err != nil {
				t.Fatal(err)
			}
			for name, matters := range map[string]string{"one": "here", "two": "here", "three": "everywhere"} {
				o := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "demo", Name: name, Labels: map[string]string{"matters": matters}}}
				if err := m.Kinds()[0].Add(o); err != nil {
					t.Fatal(err)
				}
			}
			names := func(opts ...client.ListOption) (all []string) {
				t.Helper()
				var list corev1.ConfigMapList
				if err := m.List(t.Context(), &list, append(opts, client.InNamespace("demo"), client.MatchingLabels{})...); err != nil {
					t.Fatal(err)
				}
				for _, o := range list.Items {
					all = append(all, o.Name)
				}
				slices.Sort(all)
				return all
			}
			opened = 0
			if have := names(reconcile.Local(false)); !slices.Equal(have, []string{"three"}) || opened != tc.opened {
				t.Errorf("not Local are %v, want three; %d were unpacked for that, want %d", have, opened, tc.opened)
			}
			if have := names(reconcile.Local(true)); !slices.Equal(have, []string{"one", "two"}) {
				t.Errorf("Local are %v, want one and two", have)
			}
			if have := names(); len(have) != 3 {
				t.Errorf("%v are listed of 3", have)
			}
			shared := 0
			m.EachShared(func(reconcile.Watch, client.Object) { shared++ })
			if shared != 1 {
				t.Errorf("%d are shared, want 1", shared)
			}
		})
	}
}
