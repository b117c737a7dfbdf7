package liveness

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

// constant is Evidence with one verdict for every member.
type constant Verdict

func (s constant) Answers(context.Context, clusterset.ClusterID) Verdict { return Verdict(s) }

// TestReports queries member b, with NodeReports on a real server: "+b" is an answering b, "-b" a silent one.
func TestReports(t *testing.T) {
	known := runtime.NewScheme()
	if err := errors.Join(corev1.AddToScheme(known), v1alpha1.AddToScheme(known)); err != nil {
		t.Fatal(err)
	}
	config := server.Config(t)
	config.QPS = -1
	admin, err := client.New(config, client.Options{Scheme: known})
	if err != nil {
		t.Fatal(err)
	}
	tests := map[string]struct {
		nodes []string
		probe Verdict
		want  Verdict
	}{
		"no report, an answer":              {nil, Answering, Answering},
		"no report, silence":                {nil, Silent, Silent},
		"reports of others":                 {[]string{"+a", "-c"}, Silent, Silent},
		"a node has an answer, no probe":    {[]string{"", "+b"}, Silent, Answering},
		"one node has an answer":            {[]string{"-b", "+b", "-b"}, Silent, Answering},
		"a silent node, a silent probe":     {[]string{"+a", "-b"}, Silent, Silent},
		"a silent node, an unknown probe":   {[]string{"-b", ""}, Unknown, Silent},
		"a silent node, an answering probe": {[]string{"-b"}, Answering, Answering},
		"nothing is known":                  {[]string{"+a"}, Unknown, Unknown},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "member-"}}
			if err := admin.Create(t.Context(), ns); err != nil {
				t.Fatal(err)
			}
			for i, said := range tt.nodes {
				r := &v1alpha1.NodeReport{ObjectMeta: metav1.ObjectMeta{Namespace: ns.Name, Name: fmt.Sprintf("n%d", i)}}
				switch {
				case said == "":
				case said[0] == '+':
					r.Spec.Answering = []string{said[1:], "z"}
				default:
					r.Spec.Silent = []string{said[1:], "z"}
				}
				if err := admin.Create(t.Context(), r); err != nil {
					t.Fatal(err)
				}
			}
			r := &Reports{Client: admin, Namespace: ns.Name, Probe: constant(tt.probe), Log: slog.New(slog.DiscardHandler)}
			if got := r.Answers(t.Context(), "b"); got != tt.want {
				t.Errorf("%v, want %v", got, tt.want)
			}
		})
	}
}

// unreadable is an API server that does not answer.
type unreadable struct{ client.Reader }

func (unreadable) List(context.Context, client.ObjectList, ...client.ListOption) error {
	return errors.New("no answer")
}

// If the reports cannot be read, the verdict is Unknown despite a Silent probe: a node may have an answer.
func TestUnreadableReports(t *testing.T) {
	r := &Reports{Client: unreadable{}, Namespace: "isthmus-system", Probe: constant(Silent), Log: slog.New(slog.DiscardHandler)}
	if got := r.Answers(t.Context(), "b"); got != Unknown {
		t.Errorf("%v, want %v", got, Unknown)
	}
}
