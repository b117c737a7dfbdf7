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
	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/agent/evidence"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

const reportPath = "/apis/isthmus.dev/v1alpha1/namespaces/isthmus-system/nodereports/n1"

// reportServer is an API server with one node and its report.
type reportServer struct {
	mu     sync.Mutex
	away   bool
	report string // "" there is none
	tries  int
	writes []v1alpha1.NodeReport
}

func (s *reportServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	s.tries++
	switch {
	case s.away:
		w.WriteHeader(http.StatusServiceUnavailable)
	case r.URL.Path == nodePath:
		_, _ = io.WriteString(w, `{"metadata":{"name":"n1","uid":"u1"}}`)
	case r.URL.Path == reportPath && r.Method == http.MethodPatch:
		body, _ := io.ReadAll(r.Body)
		var report v1alpha1.NodeReport
		if err := json.Unmarshal(body, &report); err != nil || r.Header.Get("Content-Type") != "application/apply-patch+yaml" {
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

// settled waits until the server was asked n more times, and something was written exactly so often.
func (s *reportServer) settled(t *testing.T, tries, writes int) {
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

// Nothing is written of what the report says already, and of nothing when there is no report.
func TestReporterWritesChangesAlone(t *testing.T) {
	for name, tc := range map[string]struct {
		report string
		known  known
	}{
		"nothing is known":  {"", known{"b": evidence.Unknown}},
		"as before":         {`{"spec":{"silent":["b"],"answering":["a","c"]}}`, known{"c": evidence.Answering, "b": evidence.Silent, "a": evidence.Answering}},
		"an emptied report": {`{"spec":{}}`, known{}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := &reportServer{report: tc.report}
			r := startReporter(t, s)
			r.Tell(tc.known)
			s.settled(t, 1, 0)
			r.Tell(known{"d": evidence.Silent})
			s.settled(t, 2, 1)
			want := v1alpha1.NodeReportSpec{Silent: []string{"d"}}
			if diff := cmp.Diff(want, s.writes[0].Spec); diff != "" {
				t.Errorf("report (-want +have):\n%s", diff)
			}
			if o := s.writes[0].OwnerReferences; len(o) != 1 || o[0].Kind != "Node" || o[0].UID != "u1" || o[0].Name != "n1" {
				t.Errorf("owners %+v", o)
			}
		})
	}
}

// What an agent before this one reported and is not so any more is taken back.
func TestReporterTakesBack(t *testing.T) {
	s := &reportServer{report: `{"spec":{"silent":["b"]}}`}
	r := startReporter(t, s)
	r.Tell(known{})
	s.settled(t, 1, 1)
	if spec := s.writes[0].Spec; len(spec.Silent)+len(spec.Answering) > 0 {
		t.Errorf("report %+v", spec)
	}
}

// While the API server is away nobody waits, and when it is back it gets what is known by then, once.
func TestReporterOutlivesAnOutage(t *testing.T) {
	s := &reportServer{away: true}
	r := startReporter(t, s)
	r.Tell(known{"b": evidence.Answering})
	s.settled(t, 2, 0)
	r.Tell(known{"b": evidence.Silent})
	s.mu.Lock()
	s.away = false
	s.mu.Unlock()
	s.settled(t, 3, 1)
	if diff := cmp.Diff(v1alpha1.NodeReportSpec{Silent: []string{"b"}}, s.writes[0].Spec); diff != "" {
		t.Errorf("report (-want +have):\n%s", diff)
	}
}
