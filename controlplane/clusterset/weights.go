package clusterset

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// MaxWeight bounds the weight of a cluster in AnnotationClusterWeights.
const MaxWeight = 1000

// Weights are the weights of the clusters of one group. A cluster of weight 0 gets no clients while another can serve.
type Weights map[ClusterID]uint32

// ParseWeights parses a value of AnnotationClusterWeights. "a=3,b=1" is one group of all clusters, in which others weigh 1;
// grouped is false. Groups that end in a semicolon, such as "a=3,b=1;c=0;", hold only the clusters that they list; grouped is
// true. No cluster occurs twice.
func ParseWeights(value string) (groups []Weights, grouped bool, err error) {
	texts := strings.Split(value, ";")
	if grouped = len(texts) > 1; grouped {
		if last := texts[len(texts)-1]; strings.TrimSpace(last) != "" {
			return nil, true, fmt.Errorf("the group %q does not end in a semicolon", strings.TrimSpace(last))
		}
		texts = texts[:len(texts)-1]
	}
	seen := map[ClusterID]bool{}
	for _, text := range texts {
		group := Weights{}
		for pair := range strings.SplitSeq(text, ",") {
			id, weight, err := parseWeight(strings.TrimSpace(pair))
			if err != nil {
				return nil, grouped, err
			}
			if seen[id] {
				return nil, grouped, fmt.Errorf("%s occurs twice", id)
			}
			seen[id], group[id] = true, weight
		}
		groups = append(groups, group)
	}
	return groups, grouped, nil
}

func parseWeight(pair string) (ClusterID, uint32, error) {
	name, number, ok := strings.Cut(pair, "=")
	if !ok {
		return "", 0, fmt.Errorf("%q has no weight", pair)
	}
	id := ClusterID(strings.TrimSpace(name))
	if err := id.Validate(); err != nil {
		return "", 0, err
	}
	n, err := strconv.ParseUint(strings.TrimSpace(number), 10, 32)
	if err != nil || n > MaxWeight {
		return "", 0, fmt.Errorf("the weight of %s is not a valid number", id)
	}
	return id, uint32(n), nil
}

// of returns the weight of a cluster; 1 for one that is not listed.
func (w Weights) of(id ClusterID) uint32 {
	if n, ok := w[id]; ok {
		return n
	}
	return 1
}

// format returns the weights of clusters as a group of an annotation.
func (w Weights) format(clusters []ClusterID) string {
	var pairs []string
	for _, id := range slices.Sorted(slices.Values(clusters)) {
		pairs = append(pairs, fmt.Sprintf("%s=%d", id, w.of(id)))
	}
	return strings.Join(pairs, ",")
}

// agreement is a set of exporters with the same weights.
type agreement struct {
	weights  Weights
	carriers []ClusterID
}

// mergeWeights returns annotations, those of the oldest export, with the weights on which exporters agree: those whose exports
// carry the same weights share their clients in that proportion. All other exporters have the share of their endpoints, so
// that no annotation of one cluster changes the share of another. Only by weight 0 for itself a cluster drains itself alone.
//
// For example, a and b state a=3,b=1, and c states c=1000,a=0: of the clients that the endpoints of a and b get together, a
// gets three quarters; c gets the share of its endpoints.
func mergeWeights(annotations map[string]string, byAge []Export) map[string]string {
	if !slices.ContainsFunc(byAge, func(e Export) bool { return e.Annotations[AnnotationClusterWeights] != "" }) {
		return annotations
	}
	merged := formatAgreements(agreements(byAge), len(byAge))
	if _, _, err := ParseWeights(annotations[AnnotationClusterWeights]); merged == "" && err != nil {
		return annotations // for the agents to report
	}
	annotations = maps.Clone(annotations)
	if merged == "" {
		delete(annotations, AnnotationClusterWeights)
		return annotations
	}
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[AnnotationClusterWeights] = merged
	return annotations
}

// agreements returns the exporters with valid weights by what they state, in order of precedence.
func agreements(byAge []Export) []*agreement {
	var all []*agreement
	for _, e := range byAge {
		w, err := statedWeights(e)
		if err != nil {
			continue
		}
		i := slices.IndexFunc(all, func(a *agreement) bool { return maps.Equal(a.weights, w) })
		if i < 0 {
			i = len(all)
			all = append(all, &agreement{weights: w})
		}
		all[i].carriers = append(all[i].carriers, e.Cluster)
	}
	return all
}

var errNotOneGroup = errors.New("it is not one group")

// statedWeights returns the weights in the annotations of an export.
func statedWeights(e Export) (Weights, error) {
	groups, grouped, err := ParseWeights(e.Annotations[AnnotationClusterWeights])
	switch {
	case err != nil:
		return nil, err
	case grouped:
		return nil, errNotOneGroup
	}
	return groups[0], nil
}

// formatAgreements returns the annotation for the agreements of a Service with a number of exporters; "" if none has an
// effect.
func formatAgreements(all []*agreement, exporters int) string {
	var text strings.Builder
	for _, a := range all {
		switch alone := len(a.carriers) == 1; {
		case len(a.carriers) == exporters && !alone:
			return a.weights.format(a.carriers)
		case alone && a.weights.of(a.carriers[0]) != 0:
			continue // a cluster alone has no proportion
		}
		text.WriteString(a.weights.format(a.carriers) + ";")
	}
	return text.String()
}
