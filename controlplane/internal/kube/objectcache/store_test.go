package objectcache

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// newScheme returns a scheme with the kinds of the core group.
func newScheme(t *testing.T) *runtime.Scheme {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := corev1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	return scheme
}

// packed is a ConfigMap of which only the metadata is kept.
type packed struct{ metav1.ObjectMeta }

func (p *packed) Unpack() client.Object { return &corev1.ConfigMap{ObjectMeta: *p.DeepCopy()} }

// Objects are found by namespace and label as they come, change their label and go, packed or not.
func TestStoreFindsObjects(t *testing.T) {
	t.Parallel()
	for name, pack := range map[string]func(client.Object) Packed{
		"as they are": nil,
		"packed": func(o client.Object) Packed {
			if o.GetName() == "odd" {
				return nil
			}
			return &packed{o.(*corev1.ConfigMap).ObjectMeta}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k := &cachedKind{Kind: Kind{IndexLabel: "app", Pack: pack}}
			s := newStore(k.index)
			put := func(namespace, name, app string) {
				o := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{"app": app}}}
				s.put(o.Namespace, o.Name, k.pack(o))
			}
			names := func(stored []any) string {
				var all []string
				for _, item := range stored {
					all = append(all, unpack(item).GetNamespace()+"/"+unpack(item).GetName())
				}
				slices.Sort(all)
				return strings.Join(all, " ")
			}
			put("a", "one", "x")
			put("a", "odd", "x")
			put("b", "one", "x")
			put("b", "one", "y") // changes its label
			for what, tc := range map[string]struct{ have, want string }{
				"label x":     {names(s.indexed("x")), "a/odd a/one"},
				"label y":     {names(s.indexed("y")), "b/one"},
				"namespace a": {names(s.in("a")), "a/odd a/one"},
				"everything":  {names(s.in("")), "a/odd a/one b/one"},
			} {
				if tc.have != tc.want {
					t.Errorf("%s: %s, want %s", what, tc.have, tc.want)
				}
			}
			mine := own(s.get("a", "one"), unpack(s.get("a", "one")))
			mine.SetLabels(map[string]string{"app": "mine"})
			if app := unpack(s.get("a", "one")).GetLabels()["app"]; app != "x" {
				t.Errorf("a change of the caller's own object is kept: %s", app)
			}
			s.remove("a", "one")
			s.remove("a", "odd")
			s.remove("a", "unknown")
			left := s.names(func(types.NamespacedName) bool { return true })
			if len(s.indexed("x")) > 0 || len(s.in("a")) > 0 || s.get("a", "one") != nil || len(left) != 1 || len(s.byIndex) != 1 || len(s.objects) != 1 {
				t.Errorf("left are %v", left)
			}
		})
	}
}
