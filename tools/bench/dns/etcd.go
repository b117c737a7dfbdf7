package dns

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/isthmus-net/isthmus/tools/bench/dns/internal/names"
)

// perTransaction is the number of objects in one etcd transaction. etcd allows 128.
const perTransaction = 100

// multiply writes the missing ServiceImports of a set directly into etcd, because creating them one by one through the API server
// takes ten times as long. They are copies of Service 0 with other names and addresses. The API server watches etcd and serves
// them like all others.
func (c *cluster) multiply(ctx context.Context, set names.Set) error {
	const registry = "/registry/multicluster.x-k8s.io/serviceimports/"
	key := func(i int) string { return registry + names.Name(i).Namespace + "/" + names.Name(i).Name }
	var found struct {
		KVs []struct {
			Value []byte `json:"value"`
		} `json:"kvs"`
	}
	if err := c.server.Etcd(ctx, "range", map[string]any{"key": []byte(key(0))}, &found); err != nil {
		return err
	}
	if len(found.KVs) != 1 {
		return fmt.Errorf("etcd has no %s", key(0))
	}
	var object unstructured.Unstructured
	if err := json.Unmarshal(found.KVs[0].Value, &object.Object); err != nil {
		return fmt.Errorf("read %s of etcd: %w", key(0), err)
	}
	object.SetManagedFields(nil) // half of the object, and unused here
	original, err := json.Marshal(object.Object)
	if err != nil {
		return err
	}
	base := string(object.GetUID())
	copyOf := func(i int) string {
		was, is := names.Name(0), names.Name(i)
		uid := fmt.Sprintf("%s%012x", base[:len(base)-12], i)
		return strings.NewReplacer(
			`"`+was.Name+`"`, `"`+is.Name+`"`, `"`+was.Namespace+`"`, `"`+is.Namespace+`"`,
			names.Address(0, 0).String(), names.Address(i, 0).String(), base, uid,
		).Replace(string(original))
	}
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(writers)
	for from := c.filled; from < set.Services; from += perTransaction {
		group.Go(func() error {
			var puts []map[string]any
			for i := from; i < min(from+perTransaction, set.Services); i++ {
				puts = append(puts, map[string]any{"requestPut": map[string]any{"key": []byte(key(i)), "value": []byte(copyOf(i))}})
			}
			return c.server.Etcd(ctx, "txn", map[string]any{"success": puts}, nil)
		})
	}
	return group.Wait()
}
