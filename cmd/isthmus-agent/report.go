package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/isthmus-net/isthmus/agent/evidence"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/clusterset/signal"
)

const (
	reportRetry    = time.Second // doubles up to reportRetryMax
	reportRetryMax = time.Minute
	// reportPause is the minimum time between two writes. Faster changes are combined.
	reportPause = time.Second
)

// A NodeReport is the only object that an agent writes. An admission policy limits each agent to the report of its own node.
//
// +kubebuilder:rbac:groups=isthmus.dev,resources=nodereports,verbs=get;create;patch,namespace=isthmus-system

// reporter keeps this node's NodeReport equal to the dataplane's evidence. It writes only differences, so a node without any
// evidence has no report. It retries while the API server is unreachable.
type reporter struct {
	server    rest.Interface
	node      string
	namespace string
	log       *slog.Logger
	changed   signal.Signal // pending while want may differ from the report

	mu   sync.Mutex
	want v1alpha1.NodeReportSpec
}

func newReporter(server rest.Interface, cfg Config, log *slog.Logger) *reporter {
	return &reporter{server: server, node: cfg.NodeName, namespace: cfg.Namespace, log: log, changed: signal.New()}
}

// SetEvidence sets the evidence to report. It does not block.
func (r *reporter) SetEvidence(known map[clusterset.ClusterID]evidence.State) {
	var want v1alpha1.NodeReportSpec
	for id, state := range known {
		switch state {
		case evidence.Silent:
			want.Silent = append(want.Silent, string(id))
		case evidence.Answering:
			want.Answering = append(want.Answering, string(id))
		case evidence.Unknown:
		}
	}
	slices.Sort(want.Silent)
	slices.Sort(want.Answering)
	r.mu.Lock()
	r.want = want
	r.mu.Unlock()
	r.changed.Notify()
}

// Run writes reports until ctx is done; then it returns nil and leaves the report in place.
func (r *reporter) Run(ctx context.Context) error {
	var have *v1alpha1.NodeReportSpec // nil while unknown
	var logged string
	retry := reportRetry
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-r.changed.C():
		}
		pause := reportPause
		if err := r.sync(ctx, &have); err == nil {
			retry, logged = reportRetry, ""
		} else if ctx.Err() == nil {
			if text := err.Error(); text != logged {
				r.log.Warn("cannot write the NodeReport, so the controller lacks this node's evidence about other members; will retry", "err", err)
				logged = text
			}
			pause, retry = retry, min(2*retry, reportRetryMax)
			r.changed.Notify() // retry, with the evidence of that time
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
	}
}

// sync makes the report equal to want. have is the report in the API server, nil while unknown.
func (r *reporter) sync(ctx context.Context, have **v1alpha1.NodeReportSpec) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if *have == nil {
		spec, err := r.read(ctx)
		if err != nil {
			return err
		}
		*have = spec
	}
	r.mu.Lock()
	want := r.want
	r.mu.Unlock()
	if slices.Equal(want.Silent, (*have).Silent) && slices.Equal(want.Answering, (*have).Answering) {
		return nil
	}
	if err := r.write(ctx, want); err != nil {
		*have = nil
		return err
	}
	*have = &want
	return nil
}

func (r *reporter) path() string {
	return fmt.Sprintf("/apis/%s/namespaces/%s/nodereports/%s", v1alpha1.GroupVersion, r.namespace, r.node)
}

// read returns the existing report of this node, an empty one if there is none.
func (r *reporter) read(ctx context.Context) (*v1alpha1.NodeReportSpec, error) {
	var report v1alpha1.NodeReport
	text, err := r.server.Get().AbsPath(r.path()).Do(ctx).Raw()
	if apierrors.IsNotFound(err) {
		return &report.Spec, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &report)
	}
	if err != nil {
		return nil, fmt.Errorf("read NodeReport %s: %w", r.node, err)
	}
	return &report.Spec, nil
}

// write writes the report. Its owner is the Node, so that it is deleted with it.
func (r *reporter) write(ctx context.Context, spec v1alpha1.NodeReportSpec) error {
	var node metav1.PartialObjectMetadata
	if err := getObject(ctx, r.server, "/api/v1/nodes/"+r.node, &node); err != nil {
		return fmt.Errorf("read Node %s: %w", r.node, err)
	}
	body, err := json.Marshal(map[string]any{
		"apiVersion": v1alpha1.GroupVersion.String(),
		"kind":       "NodeReport",
		"metadata": metav1.ObjectMeta{
			Name: r.node, Labels: map[string]string{v1alpha1.LabelManagedBy: v1alpha1.ManagedBy},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: r.node, UID: node.UID}},
		},
		"spec": map[string][]string{"silent": append([]string{}, spec.Silent...), "answering": append([]string{}, spec.Answering...)},
	})
	if err != nil {
		return fmt.Errorf("write NodeReport %s: %w", r.node, err)
	}
	// Apply would remove the spec of a report that becomes empty, and an API server refuses a report without one.
	err = r.server.Patch(types.MergePatchType).AbsPath(r.path()).Param("fieldManager", v1alpha1.FieldOwner).Body(body).Do(ctx).Error()
	if apierrors.IsNotFound(err) {
		err = r.server.Patch(types.ApplyPatchType).AbsPath(r.path()).
			Param("fieldManager", v1alpha1.FieldOwner).Param("force", "true").Body(body).Do(ctx).Error()
	}
	if apierrors.IsNotFound(err) {
		return fmt.Errorf("write NodeReport %s: %w; if the kind is missing, isthmusctl join installs it", r.node, err)
	}
	if err != nil {
		return fmt.Errorf("write NodeReport %s: %w", r.node, err)
	}
	return nil
}
