BEGIN TRANSACTION;
CREATE TABLE records (
        seq INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, uid INTEGER, pid INTEGER, fields TEXT NOT NULL
    );
INSERT INTO "records" VALUES(1,1.79572979716058349613e+09,'policy.loaded',NULL,NULL,'{"digest":"50cf76002502","files":["/tmp/mpsbzrkl3qce/s/policy.toml"]}');
INSERT INTO "records" VALUES(2,1.79572979724839019771e+09,'action',NULL,NULL,'{"action":"StartControl","reason":"no control daemon is running","rule":"promise 4: a fault, a hang or a crash ends by itself","enforce":true,"threads":10.0,"multiuser":false}');
INSERT INTO "records" VALUES(3,1.79572979743040037157e+09,'gate.connected',NULL,18494,'{}');
INSERT INTO "records" VALUES(4,1.79572979744487166401e+09,'action.done',NULL,NULL,'{"action":"StartControl","begun":2,"ok":true,"text":"control daemon 18503 runs (started by this agent)","reason":"no control daemon is running","rule":"promise 4: a fault, a hang or a crash ends by itself","enforce":true,"threads":10.0,"multiuser":false}');
INSERT INTO "records" VALUES(5,1.7957297974454007149e+09,'action',NULL,NULL,'{"action":"Reconcile","reason":"compare its answer with what the agent knows","rule":"promise 4: a fault, a hang or a crash ends by itself","enforce":true,"servers":[]}');
INSERT INTO "records" VALUES(6,1.79572979744561266905e+09,'action',NULL,NULL,'{"action":"Reconcile","reason":"confirm what a log says: servers of control daemon 18503","rule":"MPS confirms what a log says before mpsagent acts on it","enforce":true,"servers":[]}');
INSERT INTO "records" VALUES(7,1.79572979744717097288e+09,'action.done',NULL,NULL,'{"action":"Reconcile","begun":5,"ok":true,"text":"","reason":"compare its answer with what the agent knows","rule":"promise 4: a fault, a hang or a crash ends by itself","enforce":true,"servers":[]}');
INSERT INTO "records" VALUES(8,1.79572979744943451874e+09,'action.done',NULL,NULL,'{"action":"Reconcile","begun":6,"ok":true,"text":"","reason":"confirm what a log says: servers of control daemon 18503","rule":"MPS confirms what a log says before mpsagent acts on it","enforce":true,"servers":[]}');
INSERT INTO "records" VALUES(9,1.79572979816005730627e+09,'client.waiting',20001,18512,'{"connection":3248183889}');
INSERT INTO "records" VALUES(10,1.79572979816100287433e+09,'turn.began',20001,NULL,'{}');
INSERT INTO "records" VALUES(11,1795729798.175,'server.starting',20001,18514,'{}');
INSERT INTO "records" VALUES(12,1795729798.335,'server.ready',20001,18514,'{}');
INSERT INTO "records" VALUES(13,1.79572979835038900372e+09,'limits.verified',20001,NULL,'{"reason":"server 18514 started with 10 %, 2G","rule":"promise 1: every client gets exactly its policy","enforce":true,"server":18514}');
INSERT INTO "records" VALUES(14,1.7957297983503303528e+09,'client.connected',20001,18512,'{"waited":0.19027304649353027,"limits":{"threads":10.0,"memory":{"0":2147483648}},"fail_safe":false,"handover":0.18315625190734863}');
INSERT INTO "records" VALUES(15,1.79572979973248529434e+09,'client.waiting',20002,18555,'{"connection":3249756317}');
INSERT INTO "records" VALUES(16,1.79572979981633543966e+09,'client.ended',20001,18512,'{"server":18514,"outcome":"ok","seconds":1.4660050868988037,"waited":0.19027304649353027}');
INSERT INTO "records" VALUES(17,1.79572979982079911228e+09,'turn.ended',20001,NULL,'{"seconds":1.6597962379455566,"forced":false}');
INSERT INTO "records" VALUES(18,1.7957297998220927716e+09,'action',NULL,NULL,'{"action":"ShutdownServer","reason":"the last client of server 18514 of user 20001 has gone and user 20002 waits","rule":"promise 2: the GPU is never idle while a user waits","enforce":true,"server":18514,"force":false}');
INSERT INTO "records" VALUES(19,1.79572979982526159288e+09,'client.used',20001,18512,'{"seconds":1.466,"busy":0.0,"energy":146.9,"shared":false,"over":true}');
INSERT INTO "records" VALUES(20,1.79572979982694792746e+09,'action.done',NULL,NULL,'{"action":"ShutdownServer","begun":18,"ok":true,"text":"","reason":"the last client of server 18514 of user 20001 has gone and user 20002 waits","rule":"promise 2: the GPU is never idle while a user waits","enforce":true,"server":18514,"force":false}');
INSERT INTO "records" VALUES(21,1795729799.884,'server.ended',20001,18514,'{"status":0}');
INSERT INTO "records" VALUES(22,1.79572979988490390775e+09,'turn.began',20002,NULL,'{"gap":0.06410479545593262}');
INSERT INTO "records" VALUES(23,1795729799.896,'server.starting',20002,18562,'{}');
INSERT INTO "records" VALUES(24,1795729800.053,'server.ready',20002,18562,'{}');
INSERT INTO "records" VALUES(25,1.79572980006185674664e+09,'limits.verified',20002,NULL,'{"reason":"server 18562 started with 10 %, 2G","rule":"promise 1: every client gets exactly its policy","enforce":true,"server":18562}');
INSERT INTO "records" VALUES(26,1.79572980006179332731e+09,'client.connected',20002,18555,'{"waited":0.32930803298950195,"limits":{"threads":10.0,"memory":{"0":2147483648}},"fail_safe":false,"handover":0.17142486572265625}');
INSERT INTO "records" VALUES(27,1.7957298014519484043e+09,'lease.given',20003,NULL,'{"number":1,"by":0,"until":1821649801.4519484,"job":"job-7"}');
INSERT INTO "records" VALUES(28,1.79572980147212696074e+09,'drain.ordered',NULL,NULL,'{"by":0,"timeout":25920000.0}');
INSERT INTO "records" VALUES(29,1.79572980147234082222e+09,'drain.begun',NULL,NULL,'{"reason":"no new client is let in; clients at work go on for 300d00h","rule":"drain","enforce":true}');
CREATE TABLE sessions (
        number INTEGER PRIMARY KEY, kind TEXT NOT NULL, instance TEXT, uid INTEGER, pid INTEGER NOT NULL,
        came REAL NOT NULL, passed REAL, ended REAL, outcome TEXT, why TEXT, job TEXT, more TEXT NOT NULL
    );
INSERT INTO "sessions" VALUES(9,'client',NULL,20001,18512,1.79572979816005730627e+09,1.7957297983503303528e+09,1.79572979981633543966e+09,'ok',NULL,NULL,'{"limits":{"threads":10.0,"memory":{"0":2147483648}},"memory":144703488,"counted":1.466,"busy":0.0,"energy":146.9,"shared":false}');
INSERT INTO "sessions" VALUES(10,'turn',NULL,20001,0,1.79572979816100287433e+09,1.79572979816100287433e+09,1.79572979982079911228e+09,'left',NULL,NULL,'{"gap":null,"before":null}');
INSERT INTO "sessions" VALUES(15,'client',NULL,20002,18555,1.79572979973248529434e+09,1.79572980006179332731e+09,NULL,NULL,NULL,NULL,'{"limits":{"threads":10.0,"memory":{"0":2147483648}},"memory":144703488}');
INSERT INTO "sessions" VALUES(22,'turn',NULL,20002,0,1.79572979988490390775e+09,1.79572979988490390775e+09,NULL,NULL,NULL,NULL,'{"gap":0.06410479545593262,"before":20001}');
CREATE INDEX records_uid ON records (uid) WHERE uid IS NOT NULL;
CREATE INDEX records_pid ON records (pid) WHERE pid IS NOT NULL;
CREATE INDEX sessions_kind ON sessions (kind, uid, passed, ended);
CREATE INDEX sessions_open ON sessions (number) WHERE ended IS NULL;
COMMIT;
PRAGMA user_version=4;
