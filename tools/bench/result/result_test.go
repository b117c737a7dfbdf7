package result

import (
	"bytes"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-net/isthmus/tools/bench/metric"
)

func sample() Result {
	return Result{Bench: "example", Machine: "2 x CPU", Rounds: 6, Metrics: []metric.Metric{
		{Name: "cpu per connection", Value: 1.01234, Unit: "ratio", Bar: new(1.03), Better: metric.Lower, Quartiles: &[2]float64{0.991, 1.0534}},
		{Name: "queries", Value: 401234.5, Unit: "1/s", Bar: new(500000.0), Better: metric.Higher, Peer: new(53000.0), Limit: new(624000.0), Why: "the clients need a CPU too"},
		{Name: "memory", Value: 12, Unit: "MB", Better: metric.Lower},
	}}
}

func TestJSON(t *testing.T) {
	t.Parallel()
	r := sample()
	r.Metrics = r.Metrics[1:2]
	var have bytes.Buffer
	if err := r.WriteJSON(&have); err != nil {
		t.Fatal(err)
	}
	want := `{
  "bench": "example",
  "machine": "2 x CPU",
  "rounds": 6,
  "metrics": [
    {
      "name": "queries",
      "value": 401234.5,
      "unit": "1/s",
      "bar": 500000,
      "better": "higher",
      "peer": 53000,
      "limit": 624000,
      "why": "the clients need a CPU too"
    }
  ]
}
`
	if diff := cmp.Diff(want, have.String()); diff != "" {
		t.Errorf("JSON (-want +have):\n%s", diff)
	}
	r.Metrics[0].Value = math.NaN()
	if err := r.WriteJSON(&have); err == nil || !strings.Contains(err.Error(), `"queries"`) {
		t.Errorf("a value that is not a number: %v", err)
	}
}

func TestTable(t *testing.T) {
	t.Parallel()
	var have bytes.Buffer
	if err := sample().WriteTable(&have); err != nil {
		t.Fatal(err)
	}
	want := `metric              value                   unit   bar                peer   limit
cpu per connection  1.012 (0.991 to 1.053)  ratio  <= 1.03    met     -      -
queries             401235                  1/s    >= 500000  MISSED  53000  624000
memory              12                      MB     -                  -      -
MISSED by queries: the clients need a CPU too
example: median of 6 interleaved rounds on 2 x CPU
`
	if diff := cmp.Diff(want, have.String()); diff != "" {
		t.Errorf("table (-want +have):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"queries"}, sample().Missed()); diff != "" {
		t.Errorf("missed (-want +have):\n%s", diff)
	}
}

func TestPage(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	var stored bytes.Buffer
	if err := sample().WriteJSON(&stored); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "example.json"), stored.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	page, err := Page(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{
		"\n## example\n", "`make bench-example`: 6 rounds on 2 x CPU.",
		"| queries | 401235 | 1/s | >= 500000 | MISSED | 53000 | 624000 |\n",
		"\nMISSED by queries: the clients need a CPU too.\n",
	} {
		if !strings.Contains(string(page), line) {
			t.Errorf("the page lacks %q:\n%s", line, page)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "broken.json"), []byte("{"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Page(dir); err == nil || !strings.Contains(err.Error(), "broken.json") {
		t.Errorf("a broken file: %v", err)
	}
}

func TestNumber(t *testing.T) {
	t.Parallel()
	for v, want := range map[float64]string{0: "0", 1: "1", 0.012345: "0.01235", 999.96: "1000", 123456.7: "123457", 1e9: "1000000000", -2.5: "-2.5"} {
		if have := number(v); have != want {
			t.Errorf("number(%v) = %s, want %s", v, have, want)
		}
	}
}
