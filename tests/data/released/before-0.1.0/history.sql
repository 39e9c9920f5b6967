BEGIN TRANSACTION;
CREATE TABLE days (
        day TEXT NOT NULL, uid INTEGER NOT NULL, gpu REAL NOT NULL, waited REAL NOT NULL, longest REAL NOT NULL,
        clients INTEGER NOT NULL, "left" INTEGER NOT NULL, refused INTEGER NOT NULL, faults INTEGER NOT NULL,
        forced INTEGER NOT NULL, turns INTEGER NOT NULL, paused REAL NOT NULL DEFAULT 0, PRIMARY KEY (day, uid)
    ) WITHOUT ROWID;
INSERT INTO "days" VALUES('2026-11-23',20001,3.03100156784057617187e+00,2.7281665802001953125e-01,2.7281665802001953125e-01,1,0,0,0,0,1,1.42237401008605957031e+00);
INSERT INTO "days" VALUES('2026-11-23',20002,0.0,2.47025060653686523437e+00,2.47025060653686523437e+00,1,0,0,0,0,1,0.0);
CREATE TABLE job_days (
        day TEXT NOT NULL, job TEXT NOT NULL, uid INTEGER NOT NULL, gpu REAL NOT NULL, waited REAL NOT NULL,
        longest REAL NOT NULL, clients INTEGER NOT NULL, "left" INTEGER NOT NULL, refused INTEGER NOT NULL,
        faults INTEGER NOT NULL, forced INTEGER NOT NULL, turns INTEGER NOT NULL, threads REAL NOT NULL,
        memory INTEGER NOT NULL, paused REAL NOT NULL DEFAULT 0, PRIMARY KEY (day, job, uid)
    ) WITHOUT ROWID;
CREATE TABLE job_working (pid INTEGER PRIMARY KEY, job TEXT NOT NULL, uid INTEGER NOT NULL, busy REAL NOT NULL);
CREATE TABLE records (
        seq INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, uid INTEGER, pid INTEGER, fields TEXT NOT NULL
    );
INSERT INTO "records" VALUES(1,1.79543911734041333194e+09,'policy.loaded',NULL,NULL,'{"digest":"3294c004323c","files":["/run/mpsagent/policy.toml"]}');
INSERT INTO "records" VALUES(2,1.79543911760719251632e+09,'action',NULL,NULL,'{"action":"StartControl","reason":"no control daemon is running","rule":"promise 4: a fault, a hang or a crash ends by itself","enforce":true,"threads":10.0,"multiuser":true}');
INSERT INTO "records" VALUES(3,1.79543911878050541875e+09,'action.done',NULL,NULL,'{"action":"StartControl","begun":2,"ok":true,"text":"control daemon 14914 runs (started by this agent)","reason":"no control daemon is running","rule":"promise 4: a fault, a hang or a crash ends by itself","enforce":true,"threads":10.0,"multiuser":true}');
INSERT INTO "records" VALUES(4,1.79543911883289194109e+09,'action',NULL,NULL,'{"action":"Reconcile","reason":"compare with what the control daemon says","rule":"promise 4: a fault, a hang or a crash ends by itself","enforce":true,"servers":[]}');
INSERT INTO "records" VALUES(5,1.79543911887683439254e+09,'action.done',NULL,NULL,'{"action":"Reconcile","begun":4,"ok":true,"text":"","reason":"compare with what the control daemon says","rule":"promise 4: a fault, a hang or a crash ends by itself","enforce":true,"servers":[]}');
INSERT INTO "records" VALUES(6,1.79543912447203540807e+09,'gate.connected',NULL,15117,'{}');
INSERT INTO "records" VALUES(7,1.79543912493349695205e+09,'client.waiting',20001,15724,'{"connection":1795439124933497}');
INSERT INTO "records" VALUES(8,1.7954391249346010685e+09,'turn.began',20001,NULL,'{}');
INSERT INTO "records" VALUES(9,1795439124.99,'server.starting',0,15769,'{}');
INSERT INTO "records" VALUES(10,1795439125.169,'server.ready',0,15769,'{}');
INSERT INTO "records" VALUES(11,1.795439125206397295e+09,'limits.verified',0,NULL,'{"reason":"server 15769 started with 40 %, 2G","rule":"promise 1: every client gets exactly its policy","enforce":true,"server":15769}');
INSERT INTO "records" VALUES(12,1.79543912520631361012e+09,'client.connected',20001,15724,'{"waited":0.27281665802001953,"limits":{"threads":40.0,"memory":{"0":2147483648}},"fail_safe":false,"handover":0.25585317611694336}');
INSERT INTO "records" VALUES(13,1.79543912580840611453e+09,'client.waiting',20002,15821,'{"connection":1795439125808406}');
INSERT INTO "records" VALUES(14,1.79543912701811766629e+09,'action',NULL,NULL,'{"action":"Reconcile","reason":"confirm what a log says: server 15769","rule":"what a log says is confirmed before anything rests on it","enforce":true,"servers":[]}');
INSERT INTO "records" VALUES(15,1.79543912718295979504e+09,'action.done',NULL,NULL,'{"action":"Reconcile","begun":14,"ok":true,"text":"","reason":"confirm what a log says: server 15769","rule":"what a log says is confirmed before anything rests on it","enforce":true,"servers":[]}');
INSERT INTO "records" VALUES(16,1.7954391282373151779e+09,'turn.ended',20001,NULL,'{"seconds":3.3027141094207764,"forced":true}');
INSERT INTO "records" VALUES(17,1.7954391282373151779e+09,'user.paused',20001,NULL,'{"clients":1}');
INSERT INTO "records" VALUES(18,1.7954391282373151779e+09,'turn.began',20002,NULL,'{"gap":0.0}');
INSERT INTO "records" VALUES(19,1.79543912827865672111e+09,'client.connected',20002,15821,'{"waited":2.4702506065368652,"limits":{"threads":10.0,"memory":{"0":2147483648}},"fail_safe":false,"handover":0.013420820236206055}');
INSERT INTO "records" VALUES(20,1.79543912915069961552e+09,'lease.given',20003,NULL,'{"number":1,"by":0,"until":1821359129.1506996,"job":"job-7"}');
INSERT INTO "records" VALUES(21,1.79543912965952515603e+09,'drain.ordered',NULL,NULL,'{"by":0,"timeout":25920000.0}');
INSERT INTO "records" VALUES(22,1.79543912965968918801e+09,'drain.begun',NULL,NULL,'{"reason":"no new work is admitted; work goes on for 300d00h","rule":"drain","enforce":true}');
INSERT INTO "records" VALUES(23,1.79543912965968918801e+09,'user.resumed',20001,NULL,'{"seconds":1.4223740100860596}');
CREATE TABLE working (pid INTEGER PRIMARY KEY, uid INTEGER NOT NULL, busy REAL NOT NULL);
INSERT INTO "working" VALUES(15724,20001,1.79543912965968918801e+09);
INSERT INTO "working" VALUES(15821,20002,1.79543912827865672111e+09);
CREATE INDEX records_uid ON records (uid) WHERE uid IS NOT NULL;
CREATE INDEX records_pid ON records (pid) WHERE pid IS NOT NULL;
COMMIT;
PRAGMA user_version=3;
