package main

import (
	"slices"
	"strings"
	"testing"
)

// Versions that are more than one minor version apart are named.
func TestSkew(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		client string
		agents map[string]string
		want   []string
	}{
		"equal":              {"v0.2.0", map[string]string{"n1": "v0.2.0"}, nil},
		"patch":              {"v0.2.1", map[string]string{"n1": "v0.2.0"}, nil},
		"one minor version":  {"v0.2.0", map[string]string{"n1": "v0.1.9", "n2": "v0.2.0"}, nil},
		"two minor versions": {"v0.3.0", map[string]string{"n1": "v0.1.9", "n2": "v0.2.0"}, []string{"the agent of node n1 is of version v0.1.9"}},
		"newer agents":       {"v0.1.0", map[string]string{"n1": "v0.3.0"}, []string{"isthmusctl is of version v0.1.0, and the agent of node n1 of version v0.3.0"}},
		"another major":      {"v1.0.0", map[string]string{"n1": "v0.9.0"}, []string{"the agent of node n1"}},
		"development builds": {"dev", map[string]string{"n1": "dev-0123", "n2": "v0.1.0"}, nil},
	} {
		have := skew(tt.client, nil, tt.agents)
		if !slices.EqualFunc(have, tt.want, strings.HasPrefix) {
			t.Errorf("%s: %q, want %q", name, have, tt.want)
		}
	}
}

func TestCountVersions(t *testing.T) {
	t.Parallel()
	for want, by := range map[string]map[string]string{
		"none answers":              {"a": ""},
		"v0.1.0 (1), no answer (2)": {"a": "", "b": "v0.1.0", "c": ""},
		"v0.1.0":                    {"a": "v0.1.0", "b": "v0.1.0"},
		"v0.1.0 (1), v0.2.0 (2)":    {"a": "v0.1.0", "b": "v0.2.0", "c": "v0.2.0"},
	} {
		if have := countVersions(by); have != want {
			t.Errorf("%v: %q, want %q", by, have, want)
		}
	}
}
