package main

import (
	"slices"
	"testing"
)

func TestDiffering(t *testing.T) {
	t.Parallel()
	const list = "1a  agent\n2b  chart.tgz\n"
	for name, tt := range map[string]struct {
		other string
		want  []string
	}{
		"the same":        {list, nil},
		"another content": {"1a  agent\n2c  chart.tgz\n", []string{"chart.tgz"}},
		"one is missing":  {"2b  chart.tgz\n", []string{"agent"}},
		"one is added":    {list + "3c  extra\n", []string{"extra"}},
	} {
		if have := differing(list, tt.other); !slices.Equal(have, tt.want) {
			t.Errorf("%s: %q, want %q", name, have, tt.want)
		}
	}
}
