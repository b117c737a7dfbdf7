package main

import (
	"bytes"
	"context"
	"log/slog"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/cmd/internal/status"
	"github.com/isthmus-net/isthmus/cmd/internal/writers"
	"github.com/isthmus-net/isthmus/controlplane/api/fences"
)

const (
	policyPath  = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/isthmus-reserved-labels.isthmus.dev"
	bindingPath = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings/isthmus-reserved-labels.isthmus.dev"
	binding     = `{"spec":{"policyName":"isthmus-reserved-labels.isthmus.dev","validationActions":["Deny"]}}`
)

// The agent reports that the policy, or what makes it deny, is missing. It reports nothing while it cannot know.
func TestReservedLabels(t *testing.T) {
	for name, c := range map[string]struct {
		objects map[string]string
		known   bool
		fault   string
	}{
		"in force":           {map[string]string{policyPath: `{}`, bindingPath: binding}, true, ""},
		"no policy":          {map[string]string{bindingPath: binding}, true, "is missing"},
		"no binding":         {map[string]string{policyPath: `{}`}, true, "is missing"},
		"it only warns":      {map[string]string{policyPath: `{}`, bindingPath: strings.ReplaceAll(binding, "Deny", "Warn")}, true, "denies nothing"},
		"of another policy":  {map[string]string{policyPath: `{}`, bindingPath: strings.ReplaceAll(binding, "-labels", "")}, true, "denies nothing"},
		"it may not be read": {map[string]string{policyPath: "403", bindingPath: "403"}, false, ""},
		"no answer":          {map[string]string{policyPath: "500", bindingPath: binding}, false, ""},
	} {
		t.Run(name, func(t *testing.T) {
			h := httptest.NewServer(&apiServer{objects: c.objects})
			defer h.Close()
			client, err := objectServer(&rest.Config{Host: h.URL})
			if err != nil {
				t.Fatal(err)
			}
			log := &lockedBuffer{}
			r := newReservedLabels(&Config{Source: sourceKubernetes}, client, slog.New(slog.NewTextHandler(log, nil)))
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error)
			go func() { done <- r.Run(ctx) }()
			tick, late := time.NewTicker(time.Millisecond), time.After(time.Minute)
			defer tick.Stop()
			for known, _ := r.Status(); !known && !strings.Contains(log.String(), "cannot read"); known, _ = r.Status() {
				select {
				case <-tick.C:
				case <-late:
					t.Fatal("no result")
				}
			}
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
			known, fault := r.Status()
			if known != c.known || (fault != nil) != (c.fault != "") || fault != nil && !strings.Contains(fault.Error(), c.fault) {
				t.Errorf("known %v, %v", known, fault)
			}
			if n := bytes.Count([]byte(log.String()), []byte("level=WARN")); n != map[bool]int{true: 1}[c.fault != ""] {
				t.Errorf("%d warnings:\n%s", n, log)
			}
			var s status.Agent
			reportReserved(&s, r)
			reported := s.View.LabelsReserved != nil && *s.View.LabelsReserved
			if (s.View.LabelsReserved != nil) != c.known || reported != (c.known && c.fault == "") || len(s.MissingCapabilities) != map[bool]int{true: 1}[c.fault != ""] {
				t.Errorf("status %+v", s)
			}
		})
	}
}

// Without an API server, or when the objects of all writers count, there is nothing to reserve.
func TestReservedLabelsUnused(t *testing.T) {
	for _, r := range []*reservedLabels{
		newReservedLabels(&Config{Source: "dir:/x"}, nil, nil), newReservedLabels(&Config{Source: sourceKubernetes, Imports: writers.Any}, &rest.RESTClient{}, nil),
	} {
		var s status.Agent
		if reportReserved(&s, r); r != nil || s.View.LabelsReserved != nil || len(s.MissingCapabilities) != 0 {
			t.Errorf("%v, %+v", r, s)
		}
	}
}

// The agent looks for the policy that the chart and isthmusctl join install.
func TestReservedPolicyName(t *testing.T) {
	t.Parallel()
	if reservedPolicy != fences.ReservedName {
		t.Errorf("the agent looks for %s, and %s is installed", reservedPolicy, fences.ReservedName)
	}
}
