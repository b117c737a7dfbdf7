package memory

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
)

// packed is a ConfigMap of which only metadata is kept.
type packed struct{ metav1.ObjectMeta }

func (p *packed) Unpack() client.Object { return &corev1.ConfigMap{ObjectMeta: *p.DeepCopy()} }

// TestStoreFindsWhatIsThere as objects come, change their label, and go; packed or not.
func TestStoreFindsWhatIsThere(t *testing.T) {
	t.Parallel()
	for name, pack := range map[string]func(client.Object) reconcile.Packed{
		"as they are": nil,
		"packed": func(o client.Object) reconcile.Packed {
			if o.GetName() == "odd" {
				return nil
			}
			return &packed{o.(*corev1.ConfigMap).ObjectMeta}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStore(reconcile.Watch{IndexLabel: "app", Pack: pack})
			put := func(namespace, name, app string) {
				o := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{"app": app}}}
				s.put(o, s.pack(o))
			}
			names := func(stored []any) string {
				var all []string
				for _, v := range stored {
					all = append(all, open(v).GetNamespace()+"/"+open(v).GetName())
				}
				slices.Sort(all)
				return strings.Join(all, " ")
			}
			put("a", "one", "x")
			put("a", "odd", "x")
			put("b", "one", "x")
			put("b", "one", "y") // moves
			for what, tc := range map[string]struct{ have, want string }{
				"label x":     {names(s.of("x")), "a/odd a/one"},
				"label y":     {names(s.of("y")), "b/one"},
				"namespace a": {names(s.in("a")), "a/odd a/one"},
				"everything":  {names(s.in("")), "a/odd a/one b/one"},
			} {
				if tc.have != tc.want {
					t.Errorf("%s: %s, want %s", what, tc.have, tc.want)
				}
			}
			mine := own(s.get("a", "one"), open(s.get("a", "one")))
			mine.SetLabels(map[string]string{"app": "mine"})
			if app := open(s.get("a", "one")).GetLabels()["app"]; app != "x" {
				t.Errorf("what the caller does to his own is kept: %s", app)
			}
			s.remove("a", "one")
			s.remove("a", "odd")
			s.remove("a", "never there")
			if len(s.of("x")) > 0 || len(s.in("a")) > 0 || s.get("a", "one") != nil || len(s.names()) != 1 || len(s.labeled) != 1 || len(s.objects) != 1 {
				t.Errorf("left are %v", s.names())
			}
		})
	}
}
