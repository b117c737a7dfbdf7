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
)

const (
	reportRetry    = time.Second // doubles up to reportRetryMax
	reportRetryMax = time.Minute
	// reportPause is between two writes at least: what changes faster is written as it is then.
	reportPause = time.Second
)

// A NodeReport is the only object that an agent writes; an admission policy holds each to that of its own node.
//
// +kubebuilder:rbac:groups=isthmus.dev,resources=nodereports,verbs=get;create;patch,namespace=isthmus-system

// reporter keeps this node's NodeReport as the dataplane tells it. It writes when there is a difference and at no
// other time: a node where nothing ever happened has no report. An API server that is away is tried again.
type reporter struct {
	server    rest.Interface
	node      string
	namespace string
	log       *slog.Logger
	news      chan struct{} // holds a token when there is something new

	mu   sync.Mutex
	want v1alpha1.NodeReportSpec
}

func newReporter(server rest.Interface, cfg Config, log *slog.Logger) *reporter {
	return &reporter{server: server, node: cfg.NodeName, namespace: cfg.Namespace, log: log, news: make(chan struct{}, 1)}
}

// Tell takes what is known from now on. It does not wait.
func (r *reporter) Tell(known map[clusterset.ClusterID]evidence.State) {
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
	select {
	case r.news <- struct{}{}:
	default:
	}
}

// Run writes until ctx is done; then it returns nil and leaves the report as it is.
func (r *reporter) Run(ctx context.Context) error {
	var have *v1alpha1.NodeReportSpec // nil: not known
	var said string
	retry := reportRetry
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-r.news:
		}
		pause := reportPause
		if err := r.follow(ctx, &have); err == nil {
			retry, said = reportRetry, ""
		} else if ctx.Err() == nil {
			if text := err.Error(); text != said {
				r.log.Warn("the report of this node cannot be written, so its controller knows less of other members; trying goes on", "err", err)
				said = text
			}
			pause, retry = retry, min(2*retry, reportRetryMax)
			select { // again, with what is new by then
			case r.news <- struct{}{}:
			default:
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
	}
}

// follow brings the report to what is wanted. have is what the API server has, as far as that is known.
func (r *reporter) follow(ctx context.Context, have **v1alpha1.NodeReportSpec) error {
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

// read returns what the last agent of this node reported, and nothing when there is no report.
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

// write makes the report say so. It goes with the node that owns it.
func (r *reporter) write(ctx context.Context, spec v1alpha1.NodeReportSpec) error {
	var node metav1.PartialObjectMetadata
	if err := getObject(ctx, r.server, "/api/v1/nodes/"+r.node, &node); err != nil {
		return fmt.Errorf("read Node %s: %w", r.node, err)
	}
	report := v1alpha1.NodeReport{
		TypeMeta: metav1.TypeMeta{APIVersion: v1alpha1.GroupVersion.String(), Kind: "NodeReport"},
		ObjectMeta: metav1.ObjectMeta{
			Name: r.node, Labels: map[string]string{v1alpha1.LabelManagedBy: v1alpha1.ManagedBy},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: r.node, UID: node.UID}},
		},
		Spec: spec,
	}
	body, err := json.Marshal(report)
	if err != nil {
		return fmt.Errorf("write NodeReport %s: %w", r.node, err)
	}
	err = r.server.Patch(types.ApplyPatchType).AbsPath(r.path()).
		Param("fieldManager", v1alpha1.FieldOwner).Param("force", "true").Body(body).Do(ctx).Error()
	if apierrors.IsNotFound(err) {
		return fmt.Errorf("write NodeReport %s: %w; if the kind is missing, isthmusctl join brings it", r.node, err)
	}
	if err != nil {
		return fmt.Errorf("write NodeReport %s: %w", r.node, err)
	}
	return nil
}
