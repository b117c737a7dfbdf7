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

// saying is evidence that says the same of everybody.
type saying Verdict

func (s saying) Answers(context.Context, clusterset.ClusterID) Verdict { return Verdict(s) }

// TestReports asks about member b, with reports of nodes on a real server: "+b" hears from it, "-b" waits in vain.
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
		"no node says anything, an answer":      {nil, Answering, Answering},
		"no node says anything, silence":        {nil, Silent, Silent},
		"of others only":                        {[]string{"+a", "-c"}, Silent, Silent},
		"a node hears what the probe does not":  {[]string{"", "+b"}, Silent, Answering},
		"one hears, others do not":              {[]string{"-b", "+b", "-b"}, Silent, Answering},
		"a node hears nothing, nor the probe":   {[]string{"+a", "-b"}, Silent, Silent},
		"a node hears nothing, no probe can be": {[]string{"-b", ""}, Unknown, Silent},
		"a node alone is cut off":               {[]string{"-b"}, Answering, Answering},
		"nobody knows":                          {[]string{"+a"}, Unknown, Unknown},
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
			r := &Reports{Client: admin, Namespace: ns.Name, Probe: saying(tt.probe), Log: slog.New(slog.DiscardHandler)}
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

// Whoever cannot read what nodes say convicts nobody by a probe alone: a node may have heard.
func TestReportsThatCannotBeRead(t *testing.T) {
	r := &Reports{Client: unreadable{}, Namespace: "isthmus-system", Probe: saying(Silent), Log: slog.New(slog.DiscardHandler)}
	if got := r.Answers(t.Context(), "b"); got != Unknown {
		t.Errorf("%v, want %v", got, Unknown)
	}
}
