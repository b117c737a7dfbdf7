package policies

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"pgregory.net/rapid"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// policy returns a NetworkPolicy demo/allow with an age in minutes and a spec that contains text.
func policy(minutes int, text string, annotations map[string]string) *unstructured.Unstructured {
	o := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{"says": text}}}
	o.SetAPIVersion("networking.k8s.io/v1")
	o.SetKind("NetworkPolicy")
	o.SetNamespace("demo")
	o.SetName("allow")
	o.SetAnnotations(annotations)
	o.SetCreationTimestamp(metav1.NewTime(time.Unix(0, 0).Add(-time.Duration(minutes) * time.Minute)))
	return o
}

func asked(minutes int, text string) *unstructured.Unstructured {
	return policy(minutes, text, map[string]string{federationv1alpha1.AnnotationPolicyAntrea: "true", "kept": "yes", "kubectl.kubernetes.io/last-applied-configuration": "{}"})
}

// in returns the state of a reachable member that has o.
func in(id clusterset.ClusterID, o *unstructured.Unstructured) observed {
	return observed{member: id, read: true, reachable: true, served: true, namespace: true, object: o}
}

// denied makes the object of a member one that no grant lets be replicated.
func denied(h *observed) { h.denial = errors.New("no grant") }

func with(h observed, change func(*observed)) observed {
	change(&h)
	return h
}

// edit returns o, changed.
func edit(o *unstructured.Unstructured, change func(*unstructured.Unstructured)) *unstructured.Unstructured {
	o = o.DeepCopy()
	change(o)
	return o
}

func annotate(name, value string) func(*unstructured.Unstructured) {
	return func(o *unstructured.Unstructured) {
		a := o.GetAnnotations()
		a[name] = value
		o.SetAnnotations(a)
	}
}

func TestDecide(t *testing.T) {
	made := copyFrom("b", asked(1, "x"))
	say := func(text string) func(*unstructured.Unstructured) {
		return func(o *unstructured.Unstructured) { o.Object["spec"] = map[string]any{"says": text} }
	}
	tests := map[string]struct {
		into   observed // c
		others []observed
		want   verb
		edited bool
		state  State
	}{
		"no member has it":             {into: in("c", nil), others: []observed{in("b", nil)}, want: leave},
		"new":                          {into: in("c", nil), others: []observed{in("b", asked(1, "x"))}, want: create, state: Pending},
		"right":                        {into: in("c", made), others: []observed{in("b", asked(1, "x"))}, want: leave, state: Applied},
		"origin has changed":           {into: in("c", made), others: []observed{in("b", asked(1, "y"))}, want: replace, state: Pending},
		"copy was edited":              {into: in("c", edit(made, say("y"))), others: []observed{in("b", asked(1, "x"))}, want: replace, edited: true, state: Pending},
		"origin was created again":     {into: in("c", made), others: []observed{in("b", edit(asked(1, "x"), func(o *unstructured.Unstructured) { o.SetUID("again") }))}, want: replace, state: Pending},
		"copy lost a label":            {into: in("c", edit(made, annotate("kept", "no"))), others: []observed{in("b", asked(1, "x"))}, want: replace, edited: true, state: Pending},
		"copy was asked to travel":     {into: in("c", edit(made, annotate(federationv1alpha1.AnnotationPolicy, "true"))), others: []observed{in("b", asked(1, "x"))}, want: replace, edited: true, state: Pending},
		"copy was mended":              {into: in("c", edit(made, annotate(annotationRestored, "noon"))), others: []observed{in("b", asked(1, "x"))}, want: leave, state: Drift},
		"a user annotates a copy":      {into: in("c", edit(made, annotate("note", "x"))), others: []observed{in("b", asked(1, "x"))}, want: leave, state: Applied},
		"server stores something else": {into: in("c", edit(edit(made, say("X")), annotate(annotationStored, digest(map[string]any{"spec": map[string]any{"says": "X"}})))), others: []observed{in("b", asked(1, "x"))}, want: leave, state: Applied},
		"an older one, by its clock":   {into: in("c", made), others: []observed{in("a", asked(2, "y")), in("b", asked(1, "x"))}, want: leave, state: Applied},
		"most copies are of another":   {into: in("c", made), others: []observed{in("a", asked(0, "y")), in("b", asked(1, "x")), in("d", copyFrom("a", asked(0, "y"))), in("e", copyFrom("a", asked(0, "y")))}, want: replace, state: Pending},
		"other origin now":             {into: in("c", made), others: []observed{in("a", asked(2, "x")), in("b", nil)}, want: replace, state: Pending},

		"own object":           {into: in("c", policy(9, "x", nil)), others: []observed{in("b", asked(1, "x"))}, want: leave, state: Taken},
		"own federated object": {into: in("c", asked(0, "x")), others: []observed{in("b", asked(1, "x"))}, want: leave, state: Taken},
		"own by copied text": {into: in("c", edit(made, func(o *unstructured.Unstructured) {
			o.SetAnnotations(map[string]string{annotationOrigin: "b/demo/other"})
		})), others: []observed{in("b", nil)}, want: leave},
		"no kind":      {into: with(in("c", nil), func(h *observed) { h.served = false }), others: []observed{in("b", asked(1, "x"))}, want: leave, state: KindMissing},
		"no namespace": {into: with(in("c", nil), func(h *observed) { h.namespace = false }), others: []observed{in("b", asked(1, "x"))}, want: leave, state: NamespaceMissing},
		"away":         {into: with(in("c", made), func(h *observed) { h.reachable = false }), others: []observed{in("b", asked(1, "x"))}, want: leave, state: Unreachable},
		"never read":   {into: with(in("c", nil), func(h *observed) { h.read = false }), others: []observed{in("b", asked(1, "x"))}, want: leave, state: Pending},
		"refused": {into: with(in("c", nil), func(h *observed) {
			h.refusal = &refusal{content: made.GetAnnotations()[annotationContent], message: "no"}
		}), others: []observed{in("b", asked(1, "x"))}, want: create, state: Refused},
		"refused what it was": {into: with(in("c", nil), func(h *observed) { h.refusal = &refusal{content: "before"} }), others: []observed{in("b", asked(1, "x"))}, want: create, state: Pending},

		"origin lost its grant":          {into: in("c", made), others: []observed{with(in("b", asked(1, "x")), denied)}, want: remove},
		"no grant":                       {into: in("c", nil), others: []observed{with(in("b", asked(1, "x")), denied)}, want: leave},
		"the older one has no grant":     {into: in("c", nil), others: []observed{with(in("a", asked(2, "x")), denied), in("b", asked(1, "x"))}, want: create, state: Pending},
		"own without a grant":            {into: with(in("c", asked(2, "x")), denied), others: []observed{in("b", asked(1, "x"))}, want: leave, state: Taken},
		"origin is gone":                 {into: in("c", made), others: []observed{in("b", nil)}, want: remove},
		"origin is asked no more":        {into: in("c", made), others: []observed{in("b", policy(1, "x", nil))}, want: remove},
		"origin is going":                {into: in("c", made), others: []observed{in("b", edit(asked(1, "x"), func(o *unstructured.Unstructured) { o.SetDeletionTimestamp(new(metav1.Now())) }))}, want: remove},
		"origin's cluster left":          {into: in("c", made), others: []observed{in("a", nil)}, want: remove},
		"origin's cluster is silent":     {into: in("c", made), others: []observed{with(in("b", nil), func(h *observed) { h.reachable = false })}, want: leave},
		"origin's cluster is not known":  {into: in("c", made), others: []observed{with(in("b", nil), func(h *observed) { h.read = false })}, want: leave},
		"origin's cluster lost the kind": {into: in("c", made), others: []observed{with(in("b", nil), func(h *observed) { h.served = false })}, want: leave},
		"silent origin stays":            {into: in("c", nil), others: []observed{with(in("b", asked(1, "x")), func(h *observed) { h.reachable = false })}, want: create, state: Pending},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			all := append(slices.Clone(tc.others), tc.into)
			s := decide(&all[len(all)-1], all)
			if s.verb != tc.want || s.edited != tc.edited {
				t.Errorf("decided to %s, edited %t; want %s, %t", s.verb, s.edited, tc.want, tc.edited)
			}
			from := origin(all)
			if tc.state == "" {
				return
			}
			if have := result(&all[len(all)-1], from); have.State != tc.state {
				t.Errorf("state %s (%s), want %s", have.State, have.Message, tc.state)
			}
			if s.want != nil && s.want.GetAnnotations()[annotationOrigin] != string(from.member)+"/demo/allow" {
				t.Errorf("the copy says that it is of %s", s.want.GetAnnotations()[annotationOrigin])
			}
		})
	}
}

// A copy has the content of its origin, without the marks that belong to the origin.
func TestCopyFrom(t *testing.T) {
	o := asked(1, "x")
	o.SetLabels(map[string]string{"app": "shop", "argocd.argoproj.io/instance": "shop", "app.kubernetes.io/managed-by": "Helm"})
	o.SetUID("1")
	o.SetFinalizers([]string{"example.org/x"})
	o.Object["status"] = map[string]any{"phase": "Realized"}
	annotate(AnnotationStatus, "{}")(o)
	annotate(federationv1alpha1.AnnotationEpoch, "7")(o)
	before := o.DeepCopy()
	want := map[string]any{
		"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "spec": map[string]any{"says": "x"},
		"metadata": map[string]any{
			"namespace": "demo", "name": "allow",
			"labels": map[string]any{"app": "shop", "app.kubernetes.io/managed-by": "federation.isthmus.dev"},
			"annotations": map[string]any{
				"kept": "yes", annotationOrigin: "b/demo/allow", annotationOriginUID: "1", annotationContent: copyFrom("b", o).GetAnnotations()[annotationContent],
			},
		},
	}
	if diff := cmp.Diff(want, copyFrom("b", o).Object); diff != "" {
		t.Errorf("copy (-want +have):\n%s", diff)
	}
	if diff := cmp.Diff(before.Object, o.Object); diff != "" {
		t.Errorf("the origin changed (-want +have):\n%s", diff)
	}
}

// All leaders decide the same in any order of the members. After every leader has acted, none has anything left to do.
// Objects that are not copies stay unchanged.
func TestLeadersAgree(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		draw := func(id string) observed {
			h := in(clusterset.ClusterID(id), nil)
			text := rapid.SampledFrom([]string{"x", "y"}).Draw(t, "text of "+id)
			age := rapid.IntRange(0, 2).Draw(t, "age in "+id)
			switch rapid.SampledFrom([]string{"none", "own", "federated", "copy of a", "copy of b", "copy of z"}).Draw(t, "what "+id+" has") {
			case "own":
				h.object = policy(age, text, nil)
			case "federated":
				h.object = asked(age, text)
			case "copy of a":
				h.object = copyFrom("a", asked(age, text))
			case "copy of b":
				h.object = copyFrom("b", asked(age, text))
			case "copy of z":
				h.object = copyFrom("z", asked(age, text))
			}
			return h
		}
		all := []observed{draw("a"), draw("b"), draw("c")}
		next := slices.Clone(all)
		for i := range all {
			turned := slices.Clone(all)
			slices.Reverse(turned)
			s := decide(&all[i], all)
			if other := decide(&turned[len(turned)-1-i], turned); other.verb != s.verb {
				t.Fatalf("the leader of %s would %s, and %s in another order", all[i].member, s.verb, other.verb)
			}
			if s.verb == leave {
				continue
			}
			if all[i].object != nil {
				if _, ok := copyOf(all[i].object); !ok {
					t.Fatalf("the leader of %s would %s a user's object", all[i].member, s.verb)
				}
			}
			next[i].object = s.want // nil when it is removed
		}
		for i := range next {
			if s := decide(&next[i], next); s.verb != leave {
				t.Fatalf("after all did what was decided, the leader of %s would still %s", next[i].member, s.verb)
			}
		}
	})
}
