// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"context"
	"strings"
	"time"

	"github.com/redirector-dataplane/redirector/pkg/journal"
)

// RepairNode is the kind of repairs of what all pods share: programs on the cgroup, and pins.
const RepairNode Repair = "node"

// KeepNode looks after what all pods share until ctx is done: what somebody has detached or unpinned is put back within
// seconds. A failure is logged when it is a new one; the next look tries again.
func (e *Enroller) KeepNode(ctx context.Context) error {
	ticker := time.NewTicker(reconcileEvery)
	defer ticker.Stop()
	failing := ""
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		healed, err := e.Datapath.Heal()
		for _, what := range healed {
			e.Log.Warn("something was missing in the dataplane, and is there again", "what", what)
			e.journal.Add(journal.Event{Kind: journal.Repaired, What: string(RepairNode), Message: what + " was missing, and is there again"})
			e.mu.Lock()
			e.repairs[RepairNode]++
			e.mu.Unlock()
			e.ObserveRepair("", RepairNode)
		}
		switch {
		case err == nil && failing != "":
			failing = ""
			e.journal.Add(journal.Event{Kind: journal.Recovered, What: string(RepairNode), Message: "the dataplane is as it should be again"})
		case err == nil:
		case err.Error() != failing:
			failing = err.Error()
			e.Log.Error("cannot keep the dataplane as it should be: it is tried again", "error", err)
			e.journal.Add(journal.Event{Kind: journal.Failing, What: string(RepairNode), Message: strings.ReplaceAll(failing, "\n", "; ")})
		}
	}
}
