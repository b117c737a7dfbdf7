package hostile

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"
)

// Smallest returns the smallest part of objects that still does harm, and that harm: nil if not even the whole does harm again.
// The search ends with ctx, or after a time.
func Smallest(ctx context.Context, within time.Duration, objects []Object, trial func([]Object) error) (small []Object, harm error) {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	small = Shrink(objects, func(some []Object) bool {
		if ctx.Err() != nil {
			return false
		}
		err := trial(some)
		if err != nil {
			harm = err
		}
		return err != nil
	})
	return small, harm
}

// Describe prints objects as JSON. Long ones are cut in the middle.
func Describe(objects []Object) string {
	const most = 2000
	var text strings.Builder
	for _, o := range objects {
		fields, err := json.Marshal(o.Object)
		if err != nil {
			fields = []byte(err.Error())
		}
		if len(fields) > most {
			fields = fmt.Appendf(nil, "%s ... %s (%d bytes)", fields[:most/2], fields[len(fields)-most/2:], len(fields))
		}
		fmt.Fprintf(&text, "  %s\n    %s\n", o, fields)
	}
	return text.String()
}
