// Package scrape reads the metrics that a process serves in the text format of Prometheus.
package scrape

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
)

// Sample is one value of a counter or gauge.
type Sample struct {
	Name   string
	Labels map[string]string
	Value  float64
}

// Get fetches the metrics at url and returns the samples of those with the given names.
func Get(ctx context.Context, c *http.Client, url string, names ...string) ([]Sample, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, fmt.Errorf("read metrics: %w", err)
	}
	resp, err := c.Do(req)
	if err != nil {
		return nil, fmt.Errorf("read metrics: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("read metrics: %s says %s", url, resp.Status)
	}
	samples, err := parse(resp.Body, names)
	if err != nil {
		return nil, fmt.Errorf("read metrics of %s: %w", url, err)
	}
	return samples, nil
}

// Sum adds up the samples of one metric.
func Sum(samples []Sample, name string) float64 {
	var sum float64
	for _, s := range samples {
		if s.Name == name {
			sum += s.Value
		}
	}
	return sum
}

// parse returns the samples of the metrics called names. An API server serves tens of thousands of lines,
// so those that were not asked for cost nothing but being read.
func parse(r io.Reader, names []string) ([]Sample, error) {
	var samples []Sample
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := lines.Text()
		name := line[:max(0, strings.IndexAny(line, "{ "))]
		if !slices.Contains(names, name) {
			continue
		}
		labels, rest, err := parseLabels(line[len(name):])
		if err != nil {
			return nil, fmt.Errorf("%w in %q", err, line)
		}
		text, _, _ := strings.Cut(strings.TrimSpace(rest), " ") // a timestamp may follow
		value, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return nil, fmt.Errorf("%w in %q", err, line)
		}
		samples = append(samples, Sample{name, labels, value})
	}
	return samples, lines.Err()
}

// parseLabels reads {name="value",...} at the start of text, if there is one, and returns what follows.
func parseLabels(text string) (labels map[string]string, rest string, err error) {
	rest, ok := strings.CutPrefix(text, "{")
	if !ok {
		return nil, text, nil
	}
	labels = map[string]string{}
	for {
		rest = strings.TrimLeft(rest, ", ")
		if after, ok := strings.CutPrefix(rest, "}"); ok {
			return labels, after, nil
		}
		name, after, ok := strings.Cut(rest, "=")
		if !ok {
			return nil, "", fmt.Errorf("labels without an end")
		}
		// The escapes of a label's value (\\, \" and \n) mean the same in Go.
		quoted, err := strconv.QuotedPrefix(after)
		if err != nil {
			return nil, "", fmt.Errorf("label %s: %w", name, err)
		}
		if labels[name], err = strconv.Unquote(quoted); err != nil {
			return nil, "", fmt.Errorf("label %s: %w", name, err)
		}
		rest = after[len(quoted):]
	}
}
