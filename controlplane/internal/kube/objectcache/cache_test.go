package objectcache

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// packedLocal is packed and reports whether it is Local.
type packedLocal struct {
	packed

	opened *int
}

func (p *packedLocal) Local() bool { return isLocal(&p.ObjectMeta) }

func (p *packedLocal) Unpack() client.Object {
	*p.opened++
	return p.packed.Unpack()
}

func isLocal(o metav1.Object) bool { return o.GetLabels()["matters"] == "here" }

// List returns Local objects, or leaves them out, packed or not. A packed object that reports whether it is Local is left
// out without being unpacked.
func TestListLocal(t *testing.T) {
	t.Parallel()
	scheme := newScheme(t)
	opened := 0
	for name, tc := range map[string]struct {
		pack   func(client.Object) Packed
		opened int // to list what is not Local
	}{
		"not packed": {}, "packed": {pack: func(o client.Object) Packed { return &packed{o.(*corev1.ConfigMap).ObjectMeta} }},
		"packed with Local": {func(o client.Object) Packed { return &packedLocal{packed{o.(*corev1.ConfigMap).ObjectMeta}, &opened} }, 1},
	} {
		t.Run(name, func(t *testing.T) {
			kind := Kind{Source: Source{Object: &corev1.ConfigMap{}}, Pack: tc.pack, Local: func(o client.Object) bool { return isLocal(o) }}
			c, err := NewCache(scheme, []Kind{kind}, nil, nil)
			if err != nil {
				t.Fatal(err)
			}
			if err := c.Informers()[0].Replace(nil, ""); err != nil {
				t.Fatal(err)
			}
			for name, matters := range map[string]string{"one": "here", "two": "here", "three": "everywhere"} {
				o := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "demo", Name: name, Labels: map[string]string{"matters": matters}}}
				if err := c.Informers()[0].Add(o); err != nil {
					t.Fatal(err)
				}
			}
			names := func(opts ...client.ListOption) (all []string) {
				t.Helper()
				var list corev1.ConfigMapList
				if err := c.List(t.Context(), &list, append(opts, client.InNamespace("demo"), client.MatchingLabels{})...); err != nil {
					t.Fatal(err)
				}
				for _, o := range list.Items {
					all = append(all, o.Name)
				}
				slices.Sort(all)
				return all
			}
			opened = 0
			if have := names(Local(false)); !slices.Equal(have, []string{"three"}) || opened != tc.opened {
				t.Errorf("not Local are %v, want three; %d were unpacked for that, want %d", have, opened, tc.opened)
			}
			if have := names(Local(true)); !slices.Equal(have, []string{"one", "two"}) {
				t.Errorf("Local are %v, want one and two", have)
			}
			if have := names(); len(have) != 3 {
				t.Errorf("%v are listed of 3", have)
			}
			shared := 0
			c.EachShared(func(int, client.Object) { shared++ })
			if shared != 1 {
				t.Errorf("%d are shared, want 1", shared)
			}
		})
	}
}
