package main

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/agent/evidence"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

const reportPath = "/apis/isthmus.dev/v1alpha1/namespaces/isthmus-system/nodereports/n1"

// reportServer is a fake API server with one node and its report.
type reportServer struct {
	mu     sync.Mutex
	down   bool
	report string // "" if there is none
	tries  int
	writes []v1alpha1.NodeReport
}

func (s *reportServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	s.tries++
	switch {
	case s.down:
		w.WriteHeader(http.StatusServiceUnavailable)
	case r.URL.Path == nodePath:
		_, _ = io.WriteString(w, `{"metadata":{"name":"n1","uid":"u1"}}`)
	case r.URL.Path == reportPath && r.Header.Get("Content-Type") == "application/merge-patch+json" && s.report == "":
		w.WriteHeader(http.StatusNotFound)
	case r.URL.Path == reportPath && r.Method == http.MethodPatch:
		body, _ := io.ReadAll(r.Body)
		var report v1alpha1.NodeReport
		if err := json.Unmarshal(body, &report); err != nil {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		s.writes, s.report = append(s.writes, report), string(body)
		_, _ = w.Write(body)
	case r.URL.Path == reportPath && s.report != "":
		_, _ = io.WriteString(w, s.report)
	default:
		w.WriteHeader(http.StatusNotFound)
	}
}

// await waits for that number of requests and of writes. More writes are a failure.
func (s *reportServer) await(t *testing.T, tries, writes int) {
	t.Helper()
	tick, late := time.NewTicker(time.Millisecond), time.After(20*time.Second)
	defer tick.Stop()
	for {
		s.mu.Lock()
		haveTries, haveWrites := s.tries, len(s.writes)
		s.mu.Unlock()
		if haveTries >= tries && haveWrites >= writes {
			if haveWrites > writes {
				t.Fatalf("%d writes, want %d", haveWrites, writes)
			}
			return
		}
		select {
		case <-tick.C:
		case <-late:
			t.Fatalf("%d requests and %d writes, want %d and %d", haveTries, haveWrites, tries, writes)
		}
	}
}

// startReporter returns a reporter that runs until the test ends.
func startReporter(t *testing.T, s *reportServer) *reporter {
	t.Helper()
	h := httptest.NewServer(s)
	t.Cleanup(h.Close)
	server, err := objectServer(&rest.Config{Host: h.URL})
	if err != nil {
		t.Fatal(err)
	}
	r := newReporter(server, Config{NodeName: "n1", Namespace: "isthmus-system"}, slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- r.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return r
}

type known = map[clusterset.ClusterID]evidence.State

// A real API server takes each report, also one that has become empty.
func TestReportsOnAPIServer(t *testing.T) {
	config := server.Config(t)
	c, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	_, err = c.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "isthmus-system"}}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	}
	if _, err := c.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	objects, err := objectServer(config)
	if err != nil {
		t.Fatal(err)
	}
	r := newReporter(objects, Config{NodeName: "n1", Namespace: "isthmus-system"}, slog.New(slog.DiscardHandler))
	for _, want := range []v1alpha1.NodeReportSpec{{Answering: []string{"b"}}, {Silent: []string{"b", "c"}}, {}, {Answering: []string{"c"}}} {
		if err := r.write(t.Context(), want); err != nil {
			t.Errorf("%+v: %v", want, err)
			continue
		}
		have, err := r.read(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(&want, have, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("the report (-want +have):\n%s", diff)
		}
	}
}

// The reporter does not write what the report already holds, nor an empty report if there is none.
func TestReporterWritesOnlyChanges(t *testing.T) {
	for name, tc := range map[string]struct {
		report string
		known  known
	}{
		"no evidence":       {"", known{"b": evidence.Unknown}},
		"unchanged":         {`{"spec":{"silent":["b"],"answering":["a","c"]}}`, known{"c": evidence.Answering, "b": evidence.Silent, "a": evidence.Answering}},
		"an emptied report": {`{"spec":{}}`, known{}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := &reportServer{report: tc.report}
			r := startReporter(t, s)
			r.SetEvidence(tc.known)
			s.await(t, 1, 0)
			r.SetEvidence(known{"d": evidence.Silent})
			s.await(t, 2, 1)
			want := v1alpha1.NodeReportSpec{Silent: []string{"d"}}
			if diff := cmp.Diff(want, s.writes[0].Spec, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("report (-want +have):\n%s", diff)
			}
			if o := s.writes[0].OwnerReferences; len(o) != 1 || o[0].Kind != "Node" || o[0].UID != "u1" || o[0].Name != "n1" {
				t.Errorf("owners %+v", o)
			}
		})
	}
}

// The reporter corrects what an earlier agent has reported.
func TestReporterCorrectsOldReport(t *testing.T) {
	s := &reportServer{report: `{"spec":{"silent":["b"]}}`}
	r := startReporter(t, s)
	r.SetEvidence(known{})
	s.await(t, 1, 1)
	if spec := s.writes[0].Spec; len(spec.Silent)+len(spec.Answering) > 0 {
		t.Errorf("report %+v", spec)
	}
}

// While the API server is down SetEvidence does not block. Afterwards one write has the latest evidence.
func TestReporterDuringOutage(t *testing.T) {
	s := &reportServer{down: true}
	r := startReporter(t, s)
	r.SetEvidence(known{"b": evidence.Answering})
	s.await(t, 2, 0)
	r.SetEvidence(known{"b": evidence.Silent})
	s.mu.Lock()
	s.down = false
	s.mu.Unlock()
	s.await(t, 3, 1)
	if diff := cmp.Diff(v1alpha1.NodeReportSpec{Silent: []string{"b"}}, s.writes[0].Spec, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("report (-want +have):\n%s", diff)
	}
}
