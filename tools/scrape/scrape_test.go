package scrape

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const page = `# HELP requests_total How many.
# TYPE requests_total counter
requests_total{verb="PUT",resource="endpointslices"} 12
requests_total{verb="GET",resource="a \"b\", {c}=d",} 3.5e+01 1700000000000
requests_total_other 7
depth 4
`

func TestGet(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/metrics" {
			http.NotFound(w, r)
			return
		}
		_, _ = io.WriteString(w, page)
	}))
	defer server.Close()
	have, err := Get(t.Context(), server.Client(), server.URL+"/metrics", "requests_total", "depth")
	if err != nil {
		t.Fatal(err)
	}
	want := []Sample{
		{"requests_total", map[string]string{"verb": "PUT", "resource": "endpointslices"}, 12},
		{"requests_total", map[string]string{"verb": "GET", "resource": `a "b", {c}=d`}, 35},
		{"depth", nil, 4},
	}
	if diff := cmp.Diff(want, have); diff != "" {
		t.Errorf("samples (-want +have):\n%s", diff)
	}
	if sum := Sum(have, "requests_total"); sum != 47 {
		t.Errorf("sum %v, want 47", sum)
	}
	if _, err := Get(t.Context(), server.Client(), server.URL+"/other", "depth"); err == nil {
		t.Error("a page that is missing gives no error")
	}
}

func TestParseRefuses(t *testing.T) {
	t.Parallel()
	for name, line := range map[string]string{
		"no value":       "depth ",
		"a word":         "depth many",
		"open labels":    `depth{a="b" 1`,
		"open quote":     `depth{a="b} 1`,
		"label no value": `depth{a} 1`,
	} {
		if have, err := parse(strings.NewReader(line+"\n"), []string{"depth"}); err == nil {
			t.Errorf("%s: %q is taken for %+v", name, line, have)
		}
	}
}
